"""What README.md shows of planning is what is printed: `python -m tests.readme` runs its commands and renews it."""

import os
import re
import subprocess
import sys
from pathlib import Path

PATH = Path(__file__).parents[1] / "README.md"
_BLOCK = re.compile(r"(?<=```console\n)\$ (frugal (?:plan|explain) [^\n]*)\n((?:(?!\$ |```).*\n)+)(?=```)")


def shown() -> dict[str, str]:
    """The planning commands that stand alone in a block, and the output below them."""
    return dict(_BLOCK.findall(PATH.read_text()))


def printed(command: str) -> str:
    """What the command prints today, whether it is a plan or the proof that there is none."""
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        env=os.environ | {"XDG_CONFIG_HOME": os.devnull},  # no calibration of this machine
        check=False,
    )
    assert done.returncode in (0, 3), done.stdout
    return done.stdout


def renew() -> None:
    """Run them all and write what they print."""
    renewed = _BLOCK.sub(lambda block: f"$ {block[1]}\n{printed(block[1])}", PATH.read_text())
    PATH.write_text(renewed)


if __name__ == "__main__":
    renew()
