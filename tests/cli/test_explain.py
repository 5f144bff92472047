"""`frugal explain`, and `frugal plan --what-if`: what people see, from a plan or from flags."""

from pathlib import Path

import pytest

from tests.commands import Capture, frugal, with_formulas
from tests.planning.synthetic import SMALL

CARDS = ["--gpus", "4", "--mem", "12G"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, formulas in place of dry runs, and a cache that knows no other plans."""
    return with_formulas(tmp_path, monkeypatch, **SMALL, drafts=True)


def titles(out: str) -> list[str]:
    return [block.splitlines()[0] for block in out.split("\n\n")]


def test_a_plan_its_folder_and_its_flags_are_explained_alike(capsys: Capture) -> None:
    Path("run").mkdir()
    Path("run/plan.json").write_text(frugal(capsys, "plan", *CARDS, "--json")[1])
    code, out, err = frugal(capsys, "explain", *CARDS)
    assert (code, err) == (0, "")
    assert titles(out) == [
        "512 samples = 4 GPUs x 13 micro-steps of 9 or 10 samples",
        "what binds", "why", "strategies", "what would help (predicted, not dry-run)",
    ]  # fmt: skip
    assert frugal(capsys, "explain", "run") == frugal(capsys, "explain", "run/plan.json") == (0, out, "")


def test_in_full_it_says_what_the_plan_is_too(capsys: Capture) -> None:
    """Each line of `frugal plan -v` is there, in whichever order."""
    _, out, _ = frugal(capsys, "explain", *CARDS, "-v")
    assert titles(out) == [
        "512 samples = 4 GPUs x 13 micro-steps of 9 or 10 samples",
        "model      gpt2, causal-lm, 124.00M parameters, samples of 1024 tokens",
        "memory of each GPU at its peak, in backward (mm)",
        "what binds", "why", "strategies", "note", "defaults", "assumed", "what would help (predicted, not dry-run)",
    ]  # fmt: skip
    _, planned, _ = frugal(capsys, "plan", *CARDS, "-v")
    whole, _ = planned.rsplit("\n\n", 1)
    missing = set(whole.splitlines()) - set(out.splitlines())
    assert not missing


def test_what_if_adds_a_table_to_both_commands(capsys: Capture) -> None:
    axes = ["--what-if", "gpus=2,4", "mem=6G,12G", "seq-len=1024"]
    _, explained, _ = frugal(capsys, "explain", *CARDS, *axes)
    code, planned, _ = frugal(capsys, "plan", *CARDS, *axes)
    assert code == 0
    table = explained[explained.index("what if: ") :]
    assert planned.startswith(f"{table}\n")
    title, _, samples, gpus = table.splitlines()[:4]
    assert title == "what if: a step of 512 samples (predicted, not dry-run)"
    assert samples == "samples of 1024 tokens"
    assert gpus.split() == ["2", "GPUs", "4", "GPUs"]


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (["explain", "run", *CARDS], "run was given together with --gpus", "leave one of them out"),
        (["explain", "a", "b"], "got unexpected extra argument (b)", "see `frugal explain --help`"),
        (["plan", *CARDS, "--what-if", "gpu=4"], "`gpu=4` is no axis of a table", "write --what-if gpus=1,2,4 mem=12G"),
        (
            ["plan", "--mem", "12G,24G", "--what-if"],
            "a table needs a cluster of equal devices",
            "name one kind: --gpus 4",
        ),
    ],
)
def test_what_is_wrong_is_said(capsys: Capture, arguments: list[str], what: str, hint: str) -> None:
    code, _, error = frugal(capsys, *arguments)
    assert code == 2
    assert error.startswith(f"error: {what}\n") and f"\nhint: {hint}" in error
