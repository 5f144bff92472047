"""What a terminal shows of a plan, as pictures in docs/images: `python -m tests.screenshots` makes them anew.

The command really writes to a terminal; rich turns what it wrote into SVG, without the fonts that it would fetch.
"""

import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.report import pictured

IMAGES = Path(__file__).parents[1] / "docs" / "images"
COMMAND = "frugal plan --gpus 4 --mem 12G"
WIDTHS = (80, 120)

_FETCHED_FONT = re.compile(r"@font-face \{\{.*?\}\}\n", re.DOTALL)


def shown(command: str, columns: int) -> str:
    """What the command writes to a terminal of so many columns, with its escape codes."""
    ours, theirs = os.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm-256color", "XDG_CONFIG_HOME": os.devnull}
    environment = {name: value for name, value in environment.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", *command.split()], stdout=theirs, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        os.close(theirs)
        written = b""
        with suppress(OSError):  # the end, as Linux tells it
            while part := os.read(ours, 1 << 12):
                written += part
    os.close(ours)
    assert process.returncode == 0
    return written.decode().replace("\r\n", "\n")


def picture(command: str, columns: int, written: str) -> str:
    """What was written, as SVG."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"$ {command}\n{written.rstrip()}"))
    frame = inspect.signature(Console.export_svg).parameters["code_format"].default
    frame = _FETCHED_FONT.sub("", frame).replace("Fira Code, monospace", "monospace")
    return console.export_svg(title="", code_format=frame, unique_id=f"plan-{columns}")


def renew() -> None:
    """Make all pictures."""
    IMAGES.mkdir(exist_ok=True)
    for columns in WIDTHS:
        written = shown(COMMAND, columns)
        (IMAGES / f"plan-{columns}-columns.svg").write_text(picture(COMMAND, columns, written) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        pictured.draw(pictured.trained(Path(folder)), IMAGES)


if __name__ == "__main__":
    renew()
