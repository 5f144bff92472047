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
    """Return what a command of a tutorial prints; of its 40 steps two are made, and the base has few samples and much
    memory.

    `frugal` is started as `python -m frugal`, which `tests.forked` has at hand.
    """
    shorter = "--steps 2 --warmup 1 --mem 1G --set train.validation-samples=8 --set train.limit=40"
    line = line.replace("--steps 40 --out base", f"{shorter} --out base").replace("--steps 40", "--steps 2")
    line = line.replace("--steps 20 --out speech", "--steps 4 --out speech")
    command, _, out = line.partition(" > ")
    program, *arguments = shlex.split(command)
    programs = {"frugal": [sys.executable, "-m", "frugal"], "python": [sys.executable]}.get(program, [program])
    words = [*programs, *arguments]
    environment = {**os.environ, "COLUMNS": "300"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    if out:
        (folder / out).write_text(done.stdout)
    return done.stdout


def commands(page: Path) -> list[str]:
    """Lines of console blocks that begin with a prompt."""
    return [line[2:] for line in "".join(blocks(page, "console")).splitlines() if line.startswith("$ ")]


def without_numbers(text: str) -> list[str]:
    """Its lines; how many chats there are depends on Python's version."""
    return re.sub(r"[\d,.]*\d", "N", text).splitlines()


def test_fine_tuning_on_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a pretrained folder over a preview, a plan and a training with adapters to a merged model that answers."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    printed: dict[str, list[str]] = {}
    for command in commands(FINE_TUNING):
        printed.setdefault(command.partition(" --")[0], []).append(followed(command, tmp_path))
    two_cpus, one_card = printed["frugal plan"]
    assert "98.30k trained, LoRA r=8" in two_cpus and "98.30k trained, LoRA r=8" in one_card
    assert re.search(r"note +a draft: .*\n(.*\n)+fits .* of 12.00 GiB on each GPU", one_card)
    _, _, tuned, tickets = printed["frugal train"]
    assert "of prompt-response" in tickets
    shown = without_numbers(blocks(FINE_TUNING, "text")[0])
    assert without_numbers(tuned)[: len(shown)] == shown
    monkeypatch.chdir(tmp_path)
    exec(blocks(FINE_TUNING, "python")[0], {})
    assert capsys.readouterr().out.startswith(
        "<|im_start|>user\nWhat does abc.ABC do?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_module_of_speech_is_planned_checked_trained_and_exported(tmp_path: Path) -> None:
    """With its own rows, and the ds_config.json that its plan wrote."""
    page = DOCS / "tutorials" / "own-model.md"
    (tmp_path / "speech.py").write_text(blocks(page, "python")[0].replace("mel", "text"))  # as rows of texts have it
    plan, check, train, export = (followed(command, tmp_path) for command in commands(page))
    counted = "a mean over the entries of `label` that are not -100"
    assert counted in plan and counted in check and "what frugal would do with the same batch" in check
    assert "rows are samples as they are" in train and "step 4/4" in train and "model written to" in train
    assert (tmp_path / "speech" / "model" / "model.safetensors").exists() and "start it with" in export


@pytest.mark.exhaustive
def test_the_duration_and_the_cost_of_a_long_run(tmp_path: Path) -> None:
    (command,) = (line for line in commands(DOCS / "tutorials" / "first-plan.md") if "--gpu-hour-price" in line)
    printed = followed(command, tmp_path)
    run = re.search(
        r"^run +(\d+) steps of ([\d,]+) tokens, 100.00B in all: .* ([\d,]+) GPU hours, cost ([\d,.]+)", printed, re.M
    )
    assert run is not None, printed
    steps, tokens, hours, cost = (float(each.replace(",", "")) for each in run.groups())
    assert 100e9 <= steps * tokens < 100e9 + tokens and cost == pytest.approx(2 * hours, rel=1e-3)
