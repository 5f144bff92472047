"""What README.md and docs/ show of planning is what is printed: `python -m tests.readme` runs it all and renews it.

A line `...` in shown output stands for lines that are left out; those above and below it are shown.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = (README, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")), *sorted((ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(r"(?<=```console\n)\$ (frugal (?:plan|explain) [^\n]*)\n((?:(?!\$ |```).*\n)+)(?=```)")
_LEFT_OUT = "...\n"


@dataclass(frozen=True)
class Shown:
    """A planning command that stands alone in a block of `page`, and the output below it."""

    page: Path
    command: str
    output: str


def shown() -> list[Shown]:
    """All of them, in the order of the pages."""
    return [Shown(page, *block) for page in PAGES for block in _BLOCK.findall(page.read_text())]


def text(*pages: str) -> str:
    """The text of README.md, or of pages of docs/ named `benchmarks`, `reliability` and so on."""
    return "\n".join((ROOT / "docs" / f"{page}.md").read_text() for page in pages) if pages else README.read_text()


def printed(command: str) -> str:
    """Return what the command prints today, whether it is a plan or the proof that there is none."""
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=os.environ | {"XDG_CONFIG_HOME": os.devnull},  # no calibration of this machine
        check=False,
    )
    assert done.returncode in (0, 3), done.stdout
    lines = done.stdout.splitlines(keepends=True)
    return "".join(line for line in lines if not line.endswith(" ...\n"))  # said to a pipe while it waits


def shortened(output: str, like: str) -> str:
    """`output` with as many lines left out as in `like`."""
    if _LEFT_OUT not in like:
        return output
    above, below = (part.count("\n") for part in like.split(_LEFT_OUT))
    lines = output.splitlines(keepends=True)
    return "".join([*lines[:above], _LEFT_OUT, *lines[len(lines) - below :]])


def renew() -> None:
    """Run them all and write what they print."""
    outputs = {command: printed(command) for command in dict.fromkeys(each.command for each in shown())}
    for page in PAGES:
        page.write_text(_BLOCK.sub(partial(_renewed, outputs), page.read_text()))


def _renewed(outputs: Mapping[str, str], block: re.Match[str]) -> str:
    return f"$ {block[1]}\n{shortened(outputs[block[1]], block[2])}"


if __name__ == "__main__":
    renew()
