"""Tutorials are followed, command by command."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import DOCS, ROOT, blocks

FINE_TUNING = DOCS / "tutorials" / "fine-tuning.md"


def followed(line: str, folder: Path) -> str:
    """What a command of a tutorial prints; of its 40 steps two are made.

    `frugal` is started as `python -m frugal`, which `tests.forked` has at hand.
    """
    line = line.replace("--steps 40 --out base", "--steps 2 --warmup 1 --out base").replace("--steps 40", "--steps 2")
    command, _, out = line.partition(" > ")
    program, *arguments = shlex.split(command)
    words = [sys.executable, *["-m", "frugal"] * (program == "frugal"), *arguments]
    environment = {**os.environ, "COLUMNS": "300"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    if out:
        (folder / out).write_text(done.stdout)
    return done.stdout


def without_numbers(text: str) -> list[str]:
    """Its lines; how many chats there are depends on Python's version."""
    return re.sub(r"[\d,.]*\d", "N", text).splitlines()


def test_fine_tuning_on_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a pretrained folder over a preview, a plan and a training with adapters to a merged model that answers."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    commands = [line[2:] for line in "".join(blocks(FINE_TUNING, "console")).splitlines() if line.startswith("$ ")]
    printed = {command.partition(" --")[0]: followed(command, tmp_path) for command in commands}
    assert "98.30k trained, LoRA r=8" in printed["frugal plan"]
    shown = without_numbers(blocks(FINE_TUNING, "text")[0])
    assert without_numbers(printed["frugal train"])[: len(shown)] == shown
    monkeypatch.chdir(tmp_path)
    exec(blocks(FINE_TUNING, "python")[0], {})
    assert capsys.readouterr().out.startswith(
        "<|im_start|>user\nWhat does abc.ABC do?<|im_end|>\n<|im_start|>assistant\n"
    )
