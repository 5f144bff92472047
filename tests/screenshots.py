"""Pictures of a plan on a terminal, and of its page, in docs/images, made anew by `python -m tests.screenshots`.

The command really writes to a terminal; rich turns what it wrote into SVG, without the fonts that it would fetch. The
page is opened in the browser of `tests.browser`; where there is none, its pictures stay as they are.
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

from tests.browser import Browser, missing
from tests.report import pictured

IMAGES = Path(__file__).parents[1] / "docs" / "images"
COMMAND = "frugal plan --gpus 4 --mem 12G"
WIDTHS = (80, 120)

_FETCHED_FONT = re.compile(r"@font-face \{\{.*?\}\}\n", re.DOTALL)


def shown(command: str, columns: int) -> str:
    """Return what the command writes to a terminal of so many columns, with its escape codes."""
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
    """Return what was written, as SVG."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"$ {command}\n{written.rstrip()}"))
    frame = inspect.signature(Console.export_svg).parameters["code_format"].default
    frame = _FETCHED_FONT.sub("", frame).replace("Fira Code, monospace", "monospace")
    return console.export_svg(title="", code_format=frame, unique_id=f"plan-{columns}")


PAGES = {"light": (1280, 800), "dark": (1280, 800), "narrow": (390, 1500)}
"""Pictures of the page, by their names, and the pixels of their windows."""

DRAWN = "while (!document.querySelector('#memory canvas')) await new Promise((done) => setTimeout(done, 20))"


def page_pictures(command: str) -> None:
    """The page that a command writes, in windows of several widths, light and dark."""
    if reason := missing():
        print(f"the pictures of pages stay as they are: {reason}")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        subprocess.run([sys.executable, "-m", *command.split(), "--html", str(page)], check=True, capture_output=True)
        browser = Browser()
        for name, (width, height) in PAGES.items():
            browser.open(page, width=width, height=height, dark=name == "dark")
            browser.run(DRAWN)
            browser.picture(IMAGES / f"plan-page-{name}.webp", whole=False)
        browser.close()


def renew() -> None:
    """Make all pictures."""
    IMAGES.mkdir(exist_ok=True)
    page_pictures(COMMAND)
    for columns in WIDTHS:
        written = shown(COMMAND, columns)
        (IMAGES / f"plan-{columns}-columns.svg").write_text(picture(COMMAND, columns, written) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        pictured.draw(pictured.trained(Path(folder)), IMAGES)


if __name__ == "__main__":
    renew()
