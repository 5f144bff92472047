"""The README keeps its word: its example runs, its commands exist, what it shows is what comes out."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import readme

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
QUICK = ("frugal plan --gpus 4 --mem 12G", "frugal explain --gpus 4 --mem 12G")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_example_runs_and_is_short(tmp_path: Path) -> None:
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 25
    (tmp_path / "classify.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "classify.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    loss, evaluated = map(float, re.findall(r"(\d\.\d\d) on", done.stdout))
    assert loss < 1.0 and evaluated < 1.0, "four classes at random are 1.39"
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step-000060"


def test_the_two_commands_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\$ make (\w+)", README):
        assert f"\n{target}: " in makefile


def test_every_frugal_command_shown_exists() -> None:
    shown = set(re.findall(r"\$ frugal (\w+)", README))
    listed = subprocess.run(
        [sys.executable, "-m", "frugal", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert shown and all(re.search(rf"^  {command} ", listed, flags=re.MULTILINE) for command in shown)


def test_every_file_shown_exists() -> None:
    for path in re.findall(r"launch/[\w./]+\.(?:py|sh|toml|json)", README):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[] if command in QUICK else pytest.mark.exhaustive, id=command)
        for command in readme.shown()
    ],
)
def test_what_is_shown_of_planning_is_what_is_printed(command: str) -> None:
    """`make renew` brings it up to date."""
    assert readme.printed(command) == readme.shown()[command]


def test_the_cases_that_readers_rely_on_are_shown() -> None:
    shown = readme.shown()
    assert "frugal plan --gpus 4 --mem 12G" in shown
    assert sum(command.startswith("frugal explain ") for command in shown) >= 3
    assert any(output.startswith("error: ") for output in shown.values())
