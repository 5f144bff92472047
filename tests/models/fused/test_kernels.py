"""Liger's kernels give the loss and the gradient of torch's, in the place of the modules that compute the same.

They run here by Triton's interpreter, which has to be chosen before Triton is imported: in a process of its own.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import forked

FOLDER = Path(sys.prefix) / "kernels"
"""Where `make setup` puts the packages: apart, so that plans of other tests are those of a user without them."""

PROGRAM = f"""
import os, sys, tempfile
sys.path.append({str(FOLDER)!r})
os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", "."), {str(FOLDER)!r}])
os.environ[{forked.SOCKET!r}] = tempfile.mkdtemp() + "/socket"  # of a process that forks ranks with the kernels
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    from tests import forked
    forked.serve(os.environ[forked.SOCKET], read)
import pytest
sys.exit(pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "--rootdir", ".", *sys.argv[1:]]))
"""


@pytest.mark.skipif(
    not (FOLDER.is_dir() or find_spec("liger_kernel")), reason="liger-kernel is not installed: `make setup` does it"
)
def test_they_do_what_torchs_do(request: pytest.FixtureRequest) -> None:
    path = str(Path(__file__).with_name("interpreted.py"))
    done = subprocess.run(
        [sys.executable, "-", "-m", request.config.option.markexpr, path], input=PROGRAM, text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[3], capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
