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


@pytest.mark.skipif(
    not (FOLDER.is_dir() or find_spec("liger_kernel")), reason="liger-kernel is not installed: `make setup` does it"
)
def test_they_do_what_torchs_do() -> None:
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(FOLDER)])
    command = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--rootdir", "."]
    environment = {name: value for name, value in os.environ.items() if name != forked.SOCKET}  # it forks its own ranks
    done = subprocess.run(
        [sys.executable, *command, str(Path(__file__).with_name("interpreted.py"))],
        env=environment | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
