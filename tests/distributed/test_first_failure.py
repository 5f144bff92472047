"""How a rank ends."""

import os
import subprocess
import sys
from pathlib import Path

from frugal.distributed import rank_logs


def test_a_rank_whose_log_is_on_a_full_disk_is_heard_on_the_console(tmp_path: Path) -> None:
    log = rank_logs.path(tmp_path, 1)
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    program = """
import sys; from pathlib import Path
from frugal.errors import CheckpointError
from frugal.distributed import first_failure, rank_logs
rank_logs.redirect(Path(sys.argv[1]), 1)
first_failure.end_rank(CheckpointError("step 15 cannot be saved", hint="make room"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True,
        env={**os.environ, "RANK": "1", "LOCAL_RANK": "0"},
    )  # fmt: skip
    assert done.returncode == 6
    assert done.stderr == "error: step 15 cannot be saved\n\nhint: make room\n"
