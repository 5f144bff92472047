"""What `frugal plan` refuses, and with which words and exit codes."""

from pathlib import Path
from typing import Any

import pytest

from frugal.cli import run
from tests.commands import frugal_plan, with_formulas
from tests.planning.synthetic import SMALL

CARDS = ["--gpus", "4", "--mem", "12G"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, formulas in place of dry runs, and a cache that knows no other plans."""
    return with_formulas(tmp_path, monkeypatch, **SMALL)


WRONG: dict[str, tuple[list[str], int, str]] = {
    "an unknown flag": (
        ["--gpuss", "4"], 2,
        "error: no such option --gpuss\n\nhint: did you mean --gpu or --gpus?\n",
    ),
    "no number": (
        ["--gpus", "four"], 2,
        "error: invalid value for '--gpus': 'four' is not a valid integer\n\nhint: see `frugal plan --help`\n",
    ),
    "no such choice": (
        [*CARDS, "--precision", "fp8"], 2,
        "error: invalid value for '--precision': 'fp8' is not one of 'bf16', 'fp16', 'fp32'\n\n"
        "hint: see `frugal plan --help`\n",
    ),
    "an argument too many": (
        ["gpt2", *CARDS], 2,
        "error: got unexpected extra argument (gpt2)\n\nhint: see `frugal plan --help`\n",
    ),
    "a batch of zero": (
        [*CARDS, "--global-batch", "0"], 2,
        "error: --global-batch is 0\n  because it must be at least 1\n\n"
        "hint: leave --global-batch out to let frugal decide\n",
    ),
    "a negative batch": (
        [*CARDS, "--global-batch", "-4"], 2,
        "error: --global-batch is -4\n  because it must be at least 1\n\n"
        "hint: leave --global-batch out to let frugal decide\n",
    ),
    "a batch beyond counting": (
        [*CARDS, "--global-batch", "1000000000000"], 2,
        "error: a global batch of 1,000,000,000,000 samples is too large for a plan\n"
        "  because a plan names the samples of every micro-step, and can do so for 10,000,000\n\n"
        "hint: ask for at most 10,000,000 samples\n",
    ),
    "a learning rate that is no number": (
        [*CARDS, "--lr", "nan"], 2,
        "error: --learning-rate is nan\n  because it must be a finite number, at least 0\n",
    ),
    "an infinite clipping": (
        [*CARDS, "--gradient-clipping", "inf"], 2,
        "error: --gradient-clipping is inf\n  because it must be a finite number, at least 0\n",
    ),
    "a negative weight decay": (
        [*CARDS, "--weight-decay", "-0.1"], 2,
        "error: --weight-decay is -0.1\n  because it must be a finite number, at least 0\n",
    ),
    "an odd bucket": (
        [*CARDS, "--set", "reduce-bucket-elements=1"], 2,
        "error: reduce-bucket-elements is 1\n  because DeepSpeed aligns its buckets to 2 elements\n\n"
        "hint: use reduce-bucket-elements 2\n",
    ),
    "GPUs beyond counting": (
        ["--gpus", "1000000", "--mem", "12G"], 2,
        "error: 1 node with 1000000 GPUs is more than frugal plans for\n"
        "  because a plan names every GPU, and can do so for 65,536\n",
    ),
    "several amounts for one host": (
        [*CARDS, "--host-mem", "1G,2G"], 2,
        "error: --host-mem names 2 amounts\n  because all nodes are alike\n\nhint: give one, such as --host-mem 64G\n",
    ),
    "CPU ranks without memory": (
        ["--device", "cpu", "--gpus", "2"], 2,
        "error: the memory of a CPU rank is not known\n  because --mem was not given\n\n"
        "hint: frugal plan --device cpu --gpus 2 --mem 2G\n",
    ),
    "an empty model name": (
        [*CARDS, "--model", ""], 2,
        "error: --model is empty\n\nhint: leave it out for gpt2, or give a preset, a config.json or a model folder\n",
    ),
    "memory without unit": (
        ["--gpus", "4", "--mem", "12"], 2,
        "error: `12` has no unit\n  because 12 bytes is hardly what was meant\n\n"
        "hint: 12G is 12 GiB (12 x 2^30 bytes), 12GB is 12 x 10^9 bytes\n",
    ),
    "impossible pins": (
        [*CARDS, "--micro-batch", "8", "--accumulation-steps", "32"], 2,
        "error: --micro-batch 8 --accumulation-steps 32 on 4 GPUs is 1024, not 512\n"
        "  because 8 x 32 x 4 = 1024 samples, and the global batch is 512\n\n"
        "hint: use --micro-batch 4, or --accumulation-steps 16, or --global-batch 1024\n",
    ),
    "a token cap below one sample": (
        [*CARDS, "--max-tokens-per-gpu", "512"], 2,
        "error: --max-tokens-per-gpu 512 is less than one sample\n  because a sample has up to 1024 tokens\n\n"
        "hint: allow at least 1024 tokens, or shorten --seq-len\n",
    ),
    "packing documents of which only the lengths are known": (
        [*CARDS, "--pack", "--lengths", "lengths.json"], 2,
        "error: --pack was given together with --lengths\n"
        "  because packed samples have other lengths than the documents in them\n\n"
        "hint: leave --lengths out, or give the documents themselves with --data\n",
    ),
    "a missing settings file": (
        ["--config", "none.toml"], 2,
        "error: cannot read none.toml\n  because No such file or directory\n",
    ),
    "nothing fits": (
        ["--gpus", "1", "--mem", "2G", "--offload", "none"], 3,
        "error: gpt2 does not fit into a GPU of 2.00 GiB\n"
        "  because on the GPU alone ZeRO-2 lacks 877.1 MiB\n"
        "  because the nearest of 4 strategies is ZeRO-2, activation checkpointing offloaded, with 1 sample of 1024 "
        "tokens\n"
        "  because it takes 2.55 GiB: optimizer 1.39 GiB, gradients 473.0 MiB, context 396.0 MiB, "
        "parameters 236.5 MiB, activations 48.8 MiB, communication 38.1 MiB\n"
        "  because 313.5 MiB stay free as margin\n\n"
        "hint: this would fit: --offload auto, or --mem 3G, or --gpus 2\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_with_an_exit_code(capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, code, message = WRONG[case]
    assert frugal_plan(capsys, *arguments) == (code, "", message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("gpus = ", "error: frugal.toml is not TOML\n  because Invalid value (at end of document)\n"),
        ('{"gpus": 4}', "error: frugal.toml is not TOML\n  because Invalid statement (at line 1, column 1)\n"),
        ("global-batsh = 4",
         "error: unknown setting `global_batsh` in frugal.toml\n\nhint: did you mean `global_batch`?\n"),
        ('gpus = "4"', "error: `gpus` in frugal.toml is '4'\n  because it must be a whole number\n"),
        ('precision = "fp8"',
         "error: `precision` in frugal.toml is 'fp8'\n  because it must be one of bf16, fp16, fp32\n"),
        ("train = 3", "error: `train` in frugal.toml is 3\n  because it must be a table\n\nhint: write [train]\n"),
    ],
)  # fmt: skip
def test_a_broken_settings_file_is_refused(
    capsys: pytest.CaptureFixture[str], here: Path, content: str, message: str
) -> None:
    (here / "frugal.toml").write_text(content)
    assert frugal_plan(capsys, *CARDS) == (2, "", message)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plann"]) == 2
    assert capsys.readouterr().err == "error: no such command 'plann'\n\nhint: see `frugal --help`\n"


def test_an_interrupt_exits_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
