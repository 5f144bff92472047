"""Commands of frugal, called in the test's own process."""

from importlib import import_module
from pathlib import Path
from typing import TypeAlias

import pytest

from frugal.cli import run
from tests.planning.synthetic import dry_running

Capture: TypeAlias = pytest.CaptureFixture[str]


def frugal(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    code = run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def frugal_plan(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """The same of `frugal plan`."""
    return frugal(capsys, "plan", *arguments)


def with_formulas(folder: Path, monkeypatch: pytest.MonkeyPatch, **model: int | float) -> Path:
    """`folder` to run in, formulas in place of dry runs, and a cache that knows no other plans."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    users = ("frugal.dryrun.client", "frugal.cli.explain", "frugal.tools.plan_page.answers")
    modules = list(map(import_module, users))  # before any is changed: one imported later would keep the formulas
    for user in modules:
        of_page = {"drafts": False} if user.__name__.endswith("answers") else {}  # its charts are of real timelines
        monkeypatch.setattr(user, "DryRunSource", dry_running(**model | of_page))
    return folder
