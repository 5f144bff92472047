"""Commands that tests start have their imports done, and what was imported is not looked at again and again."""

import gc
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no types
import pytest

from tests import forked


def test_a_command_is_forked_whatever_was_imported_before() -> None:
    """Otherwise each of some hundred would spend seconds on imports, and nobody would notice."""
    import torch._inductor.runtime.cache_dir_utils  # noqa: F401 - sets a variable

    assert forked._can_be_forked([sys.executable, "-m", "frugal", "train"], dict(os.environ))


def test_one_with_other_settings_of_the_interpreter_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUTF8", "0")
    assert not forked._can_be_forked([sys.executable, "-m", "frugal", "train"], dict(os.environ))
    assert not forked._can_be_forked([sys.executable, "-c", "import frugal"], dict(os.environ))


def test_it_is_the_command_s_own_process_with_its_input_output_and_code() -> None:
    words = [sys.executable, "-m", "frugal", "explain", "--no-such-flag"]
    done = subprocess.run(words, capture_output=True, text=True, input="", timeout=120)
    assert (done.returncode, done.stdout) == (2, "") and "--no-such-flag" in done.stderr


def test_a_script_is_the_main_program_with_its_arguments_beside_its_modules(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("number = 7")
    text = "import sys, beside; print(__name__, sys.argv[1:], beside.number); sys.exit(3)"
    (tmp_path / "script.py").write_text(text)
    done = subprocess.run([sys.executable, tmp_path / "script.py", "a b"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "__main__ ['a b'] 7\n", "")


def test_torchrun_and_its_ranks_are_forked_too(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("import os, sys; print(os.environ['RANK'], 'peft' in sys.modules)")
    words = [sys.executable, Path(sys.executable).with_name("torchrun"), "--standalone", "rank.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "0 True\n", done.stderr


def test_collections_do_not_visit_what_was_imported_after_a_dry_run_has_unfrozen_it() -> None:
    imported = gc.get_freeze_count()
    gc.unfreeze()
    assert gc.get_freeze_count() > 0.9 * imported > 0


PARENT = """
import os, subprocess, sys
child = "import os, time; print(os.getppid(), flush=True); time.sleep(600)"
open("child.py", "w").write(child)
process = subprocess.Popen([sys.executable, "child.py"], stdout=subprocess.PIPE, text=True)
print(os.getpid() == int(process.stdout.readline()), process.pid, flush=True)
print(process.wait())
"""


def test_a_command_that_is_disturbed_is_the_parent_of_what_it_starts(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    process = forked.popen([sys.executable, "parent.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    is_parent, number = process.stdout.readline().split()
    assert is_parent == "True"
    child = psutil.Process(int(number))
    assert child in psutil.Process(process.pid).children() and "child.py" in child.cmdline()
    child.kill()
    assert process.communicate(timeout=60) == (f"{-signal.SIGKILL}\n", None)


DIES = """
import os, threading, time

def test_it_dies():
    if os.fork() == 0:
        time.sleep(100)
    threading.Thread(target=os._exit, args=[1]).start()
    time.sleep(600)
"""


@pytest.mark.exhaustive
def test_a_worker_that_dies_ends_the_tests_with_its_name_though_a_process_outlives_it(tmp_path: Path) -> None:
    (tmp_path / "test_dies.py").write_text(DIES)
    words = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-n", "1", "--max-worker-restart", "0", tmp_path)
    with (tmp_path / "said").open("w") as said:  # a pipe would be held by that process, too
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words], cwd=Path(__file__).parents[1], stdout=said,
            stderr=subprocess.DEVNULL, check=False, timeout=80,
        )  # fmt: skip
    assert done.returncode == 1
    assert re.search(
        "worker 'gw0' crashed while running '.*test_dies.py::test_it_dies'", (tmp_path / "said").read_text()
    )
