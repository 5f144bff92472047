"""How a rank ends."""

import subprocess
import sys


def test_a_reader_that_has_left_is_no_bug() -> None:
    """rich raises SystemExit(1) where standard output is closed, as in `frugal train | head`."""
    program = "from frugal.training import failure; failure.end(SystemExit(1))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
