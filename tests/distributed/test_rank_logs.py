"""A console that is gone ends no run: what the log files get stays whole, and one of them says so."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, time
from pathlib import Path
from frugal.distributed import rank_logs
rank_logs.guard_console()
print("before", flush=True)
rank_logs.redirect(Path(sys.argv[1]), 0)
sys.stdin.readline()
from rich.console import Console
from rich.progress import Progress
with Progress(console=Console()) as progress:  # writes on a thread of its own, too
    task = progress.add_task("steps", total=40)
    for step in range(40):
        progress.console.print(f"step {step}")
        rank_logs.to_file(f"step {step}")
        progress.advance(task)
        time.sleep(0.01)
os.write(1, b"from C++\\n")
rank_logs.to_console("at the end")
"""
NOTES = {
    "pipe": "standard output is gone (Broken pipe)",
    "terminal": "standard output is gone (Input/output error)",
    "disk": "standard output is gone (No space left on device)",
}


@pytest.mark.parametrize("console", ["pipe", "terminal", "disk"])
def test_the_loss_of_the_console_is_noted_once_and_nothing_else_is_lost(console: str, tmp_path: Path) -> None:
    ours, theirs = {"pipe": os.pipe, "terminal": pty.openpty, "disk": lambda: (-1, os.open("/dev/full", os.O_WRONLY))}[
        console
    ]()
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    os.close(theirs)
    if ours >= 0:
        assert os.read(ours, 100).startswith(b"before")
        os.close(ours)
    _, errors = run.communicate("go on\n", timeout=60)
    assert (run.returncode, errors) == (0, "at the end\n")
    lines = (tmp_path / "logs" / "rank_0.log").read_text().splitlines()
    note = f"{NOTES[console]}: the run continues, and its output there is lost"
    assert lines.count(note) == 1
    assert [line for line in lines if line != note] == [*(f"step {step}" for step in range(40)), "at the end"]


def test_streams_that_are_closed_at_the_start_lend_their_numbers_to_no_file(tmp_path: Path) -> None:
    program = (
        "import os; from frugal.distributed import rank_logs; rank_logs.guard_console(); print('gone', flush=True)\n"
        f"with open({str(tmp_path / 'file')!r}, 'w') as file: assert file.fileno() > 2; os.write(1, b'from C++')"
    )
    subprocess.run(f'"{sys.executable}" -c "{program}" <&- >&- 2>&-', shell=True, check=True)
    assert (tmp_path / "file").read_text() == ""
