"""Requests that `frugal plan` refuses, with their messages and exit codes."""

from pathlib import Path
from typing import Any

import pytest

from frugal.cli import run
from tests.commands import Capture, frugal_plan, with_formulas
from tests.planning.synthetic import SMALL

CARDS = ["--gpus", "4", "--mem", "12G"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, formulas in place of dry runs, and a cache that knows no other plans."""
    return with_formulas(tmp_path, monkeypatch, **SMALL)


WRONG: dict[str, tuple[list[str], int, str]] = {
    "an unknown flag": (["--gpuss", "4"], 2, "did you mean --gpu or --gpus?"),
    "an unknown letter": (["-x", "4"], 2, "error: no such option -x\n\nhint: see `frugal plan --help`"),
    "a card for a number": (
        ["--gpus", "8xA100"], 2, "`8xA100` is a card, and no number of them; write --gpu a100-40g or a100-80g, and",
    ),
    "no number": (["--gpus", "four"], 2, "'--gpus': `four` is no whole number; write a count such as 512"),
    "no such choice": ([*CARDS, "--precision", "fp8"], 2, "'fp8' is not one of 'bf16', 'fp16', 'fp32'"),
    "an argument too many": (["gpt2", *CARDS], 2, "got unexpected extra argument (gpt2)"),
    "a batch beyond counting": (
        [*CARDS, "--global-batch", "1000000000000"], 2, "a global batch of 1,000,000,000,000 samples is too large",
    ),
    "a learning rate that is no number": ([*CARDS, "--lr", "nan"], 2, "error: --learning-rate is nan"),
    "GPUs beyond counting": (["--gpus", "1000000", "--mem", "12G"], 2, "can do so for 65,536"),
    "several amounts for one host": ([*CARDS, "--host-mem", "1G,2G"], 2, "`host-mem` names 2 amounts"),
    "CPU ranks without memory": (
        ["--device", "cpu", "--gpus", "2"], 2, "hint: add --mem 2G",
    ),
    "an empty model name": ([*CARDS, "--model", ""], 2, "error: --model is empty"),
    "a token cap below one sample": (
        [*CARDS, "--max-tokens-per-gpu", "512"], 2, "error: --max-tokens-per-gpu 512 is less than one sample",
    ),
    "lengths beside data, also in --set": (
        [*CARDS, "--data", "x.jsonl", "--set", "lengths=[100, 200]"], 2, "--data was given together with --lengths",
    ),
    "packing documents of which only the lengths are known": (
        [*CARDS, "--pack", "--lengths", "lengths.json"], 2, "error: --pack was given together with --lengths",
    ),
    "a missing settings file": (["--config", "none.toml"], 2, "error: cannot read none.toml"),
    "nothing fits": (
        ["--gpus", "1", "--mem", "2G", "--offload", "none"], 3,
        "hint: this would fit: --offload auto, or --mem 3G, or --gpus 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_with_an_exit_code(capsys: Capture, case: str) -> None:
    arguments, code, said = WRONG[case]
    ended, out, error = frugal_plan(capsys, *arguments)
    assert (ended, out) == (code, "")
    assert error.startswith("error: ") and said in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("gpus = ", "error: frugal.toml is not TOML\n  because Invalid value (at end of document)\n"),
        ('{"gpus": 4}', "error: frugal.toml is not TOML\n  because Invalid statement (at line 1, column 1)\n"),
        ("global-batsh = 4",
         "error: unknown setting `global_batsh` in frugal.toml\n\nhint: did you mean `global_batch`?\n"),
        ("train = 3", "error: `train` in frugal.toml is 3\n  because it must be a table\n\nhint: write [train]\n"),
    ],
)  # fmt: skip
def test_a_broken_settings_file_is_refused(capsys: Capture, here: Path, content: str, message: str) -> None:
    (here / "frugal.toml").write_text(content)
    assert frugal_plan(capsys, *CARDS) == (2, "", message)


def test_an_unknown_command_is_refused(capsys: Capture) -> None:
    assert run(["plann"]) == 2
    assert capsys.readouterr().err == "error: no such command 'plann'\n\nhint: see `frugal --help`\n"


def test_an_interrupt_exits_with_130(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("frugal.dryrun.client.DryRunSource", interrupted)
    assert frugal_plan(capsys, *CARDS)[0] == 130


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("frugal.dryrun.client.DryRunSource", broken)
    with pytest.raises(ZeroDivisionError, match="ours"):
        run(["plan", *CARDS])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--epochs", "3"], "--epochs was given without --data"),
        (["--steps", "3", "--gpu-hour-price", "-1"], "--gpu-hour-price is -1.0"),
        (["--steps", "3", "--train-tokens", "1M"], "--steps and --train-tokens were both given"),
    ],
)
def test_the_length_of_a_run_is_refused_before_anything_is_planned(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, flags: list[str], says: str
) -> None:
    monkeypatch.setattr("frugal.cli.plan.plans", None)
    code, _, err = frugal_plan(capsys, "--gpus", "4", "--mem", "12G", *flags)
    assert (code, err.splitlines()[0]) == (2, f"error: {says}")
