"""`frugal plan`: what it prints and writes, and one real run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import frugal
from frugal.cli import run
from frugal.planning.plan import Plan
from tests.commands import frugal as called
from tests.commands import frugal_plan, with_formulas
from tests.planning.synthetic import SMALL, dry_running

CARDS = ["--gpus", "4", "--mem", "12G"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, formulas in place of dry runs, and a cache that knows no other plans."""
    return with_formulas(tmp_path, monkeypatch, **SMALL)


VERDICT = """\
512 samples = 4 GPUs x 13 micro-steps of 9 or 10 samples
runs   gpt2, 124.00M parameters, bf16: ZeRO-2, activation checkpointing off
fits   10.76 GiB of 12.00 GiB on each GPU, 577.5 MiB of headroom
step   2.3 s estimated, 219 samples/s: compute 82 %, communication 18 %
rate   224,740 tokens/s, 56,185 a GPU (predicted)
binds  memory: micro-batch 11 would be about 399.1 MiB short
"""


def test_it_says_in_nine_lines_what_the_plan_comes_to(capsys: pytest.CaptureFixture[str]) -> None:
    """Formulas that cannot be drafted predict nothing, so no line says what would help."""
    code, out, err = frugal_plan(capsys, *CARDS)
    assert (code, err) == (0, "")
    notes, verdict = out.split("\n\n")
    assert notes == (
        "note   ds_config.json alone would train 520 samples per step, not 512: DeepSpeed cannot express uneven "
        "micro-batches; use plan.json, or `frugal export`, which plans equal ones"
    )
    assert verdict == VERDICT + "more   `frugal plan -v`: all of it; `frugal explain`: what binds and what helps\n"
    assert len(verdict.splitlines()) <= 9 and max(map(len, verdict.splitlines())) <= 80


def test_what_would_help_most_is_predicted_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    with_formulas(here, monkeypatch, **SMALL, drafts=True)
    _, out, _ = frugal_plan(capsys, *CARDS)
    helps = next(line for line in out.splitlines() if line.startswith("helps"))
    _, explained, _ = called(capsys, "explain", *CARDS)
    row = next(line for line in explained.splitlines() if line.strip().startswith("5 GPUs"))
    assert helps == "helps  5 GPUs: a step of 2.0 s, 14 % less (predicted)"
    assert row.split()[2:5] == ["2.0", "s", "-14"]
    monkeypatch.setattr("frugal.dryrun.client.DryRunSource", None)  # nothing is left to ask it
    assert frugal_plan(capsys, *CARDS) == (0, out, "")


def test_python_takes_a_draft_as_the_command_does_until_a_proven_plan_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    with_formulas(here, monkeypatch, **SMALL, drafts=True)
    draft = frugal.plan(gpus=4, mem="12G", draft=True)
    assert draft.is_draft and draft.to_json().decode() == frugal_plan(capsys, *CARDS, "--draft", "--json")[1]
    proven = frugal.plan(gpus=4, mem="12G")
    assert not proven.is_draft and frugal.plan(gpus=4, mem="12G", draft=True) == proven


@pytest.mark.parametrize(("more", "num_samples"), [([], 380), (["--validation-data", "0%"], 400)])
def test_python_plans_for_data_as_the_command_does(
    more: list[str], num_samples: int, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    rows = [{"body": "x" * (20 + number % 200)} for number in range(400)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked: dict[str, Any] = {"gpus": 4, "mem": "12G", "data": "rows.jsonl", "columns": {"text": "body"}}
    made = frugal.plan(**asked, tokenizer="byte", **({"validation_data": "0%"} if more else {}))
    assert made.grouping is not None and made.grouping.num_samples == num_samples, "5 % are for validation"
    assert made.request.seq_len < 1024, "that of the data, which is shorter than the default"
    flags = ["--data", "rows.jsonl", "--columns", "text=body", "--tokenizer", "byte"]
    code, out, err = frugal_plan(capsys, *CARDS, *flags, *more, "--json")
    assert (code, out) == (0, made.to_json().decode()), err
    with pytest.raises(frugal.RequestError, match="no data at"):
        frugal.plan(gpus=4, mem="12G", data=["nowhere.jsonl"])


def test_a_folder_that_has_the_name_of_a_preset_is_said_not_to_be_taken(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, here: Path
) -> None:
    Path("gpt2").mkdir()
    assert frugal_plan(capsys, *CARDS)[0] == 0 and not caplog.messages
    Path("gpt2/config.json").write_text("{}")
    assert frugal_plan(capsys, *CARDS)[0] == 0
    assert caplog.messages == ["--model gpt2 is not the folder gpt2 here, which is --model ./gpt2"]


def test_with_v_it_prints_the_whole_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Shown in docs/tutorials/first-plan.md; the table of strategies is that of tests/planning/test_report.py."""
    code, out, err = frugal_plan(capsys, *CARDS, "-v")
    assert (code, err) == (0, "") and out.endswith("\n\n" + VERDICT)
    parts = {part.splitlines()[0]: part.splitlines()[1:] for part in out.removesuffix(VERDICT).strip().split("\n\n")}
    assert list(parts) == [
        VERDICT.splitlines()[0], "model      gpt2, causal-lm, 124.00M parameters, samples of 1024 tokens",
        "memory of each GPU at its peak, in backward (mm)", "why", "note", "strategies", "defaults", "assumed",
    ]  # fmt: skip
    memory = dict(line.split(maxsplit=1) for line in parts["memory of each GPU at its peak, in backward (mm)"])
    assert memory | {"total": "10.76 GiB", "headroom": "577.5 MiB", "margin": "689.2 MiB"} == memory
    assert "  memory binds: micro-batch 11 would be about 399.1 MiB short" in parts["why"]
    assert parts["assumed"][-1].startswith("  generic card: 70 TFLOP/s reached, 595 GB/s of memory, 12 GB/s between")


def headline(out: str) -> str:
    return out.split("\n\n")[-1].splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--global-batch", "500", "--max-tokens-per-gpu", "8192"],
         "500 samples = 4 GPUs x 16 micro-steps of 7 or 8 samples"),
        (["--global-batch", "4"], "4 samples = 4 GPUs x micro-batch 1 x 1 accumulation step"),
        (["--global-batch", "1"], "1 sample = 4 GPUs x 1 micro-step of 0 or 1 sample"),
        (["--global-tokens", "100000", "--max-tokens-per-gpu", "5120"],
         "99,328 of 100,000 tokens: 97 samples of 1024 = 4 GPUs x 5 micro-steps of 4 or 5 samples "
         "(at most 5,120 tokens)"),
        (["--mem", "8G,8G,12G,12G", "--global-batch", "100"],
         "100 samples = 4 GPUs x micro-batch 5 x 5 accumulation steps"),
        (["--nodes", "2", "--device", "cpu"], "512 samples = 8 ranks x micro-batch 8 x 8 accumulation steps"),
    ],
)  # fmt: skip
def test_the_arithmetic_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    _, out, _ = frugal_plan(capsys, *CARDS, *arguments)
    assert headline(out) == line


def test_json_is_exactly_the_file(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    _, out, _ = frugal_plan(capsys, *CARDS, "--json", "-o", "run")
    assert out == (here / "run" / "plan.json").read_text()
    assert Plan.from_json(out.encode()).request.model == "gpt2"


def test_it_says_where_it_wrote(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    _, out, _ = frugal_plan(capsys, *CARDS, "-o", "run")
    assert out.endswith("\nwrote  run/plan.json, run/ds_config.json and run/plan.html; more: `frugal explain run`\n")
    assert json.loads((here / "run" / "ds_config.json").read_text())["train_batch_size"] == 13 * 10 * 4


def test_the_page_of_a_plan_names_it_and_says_where_it_is(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    _, out, _ = frugal_plan(capsys, *CARDS, "--html", "pages/gpt2.html")
    assert out.endswith("\nwrote  pages/gpt2.html\n")
    _, written, _ = frugal_plan(capsys, *CARDS, "--json", "-o", "run")
    for page in ("pages/gpt2.html", "run/plan.html"):
        assert Plan.from_json(written.encode()).digest in (here / page).read_text()


def test_a_page_that_cannot_be_written_is_an_error(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "pages").touch()
    code, _, err = frugal_plan(capsys, *CARDS, "--html", "pages/gpt2.html")
    assert code == 2 and err.startswith("error: cannot write to pages\n")
    code, _, err = frugal_plan(capsys, *CARDS, "-o", "/proc/plan")  # where the root user may write, too
    assert (code, err.partition("\n")[0]) == (2, "error: cannot write to /proc/plan") and err.endswith("with -o\n")


def test_a_default_length_gives_way_to_what_the_model_can_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frugal.dryrun.client.DryRunSource", dry_running(**SMALL, max_positions=512))
    _, out, _ = frugal_plan(capsys, *CARDS)
    assert "note   samples have 512 tokens instead of 1024: gpt2 has no more positions\n" in out
    code, _, err = frugal_plan(capsys, *CARDS, "--seq-len", "1024")
    assert (code, err) == (
        2,
        "error: --seq-len 1024 is longer than gpt2 can read\n  because it has 512 positions\n\n"
        "hint: use --seq-len 512\n",
    )


def test_help_and_version_need_no_torch() -> None:
    program = "import sys; from frugal.cli import run; run(['plan', '--help']); assert 'torch' not in sys.modules"
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert "--global-batch INTEGER" in out
    assert run(["--version"]) == 0


@pytest.mark.parametrize("arguments", [["-h"], ["plan", "-h"], ["train", "-h"]])
def test_help_has_a_short_name(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(arguments) == 0
    assert "-h, --help" in capsys.readouterr().out


def test_the_command_really_dry_runs(here: Path) -> None:
    """Nothing replaced: the real model and the real DeepSpeed on meta tensors, from an empty cache."""
    environment = os.environ | {"XDG_CACHE_HOME": str(here / "cache")}
    command = [sys.executable, "-m", "frugal", "plan", *CARDS, "--json", "-o", "run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here, env=environment)
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(done.stdout.encode())
    assert plan.model.parameters == 124_439_808
    assert plan.batch.micro_batch == (16,) * 4
    assert plan.batch.accumulation_steps == 8
    assert (plan.strategy.activation_checkpointing, plan.strategy.loss) == ("off", "tiled")
    assert plan.memory.fits
    assert [note.split()[0] for note in plan.warnings] == ["dropout"], "the profile and the dry run agree"
    again = subprocess.run(
        [sys.executable, "-X", "importtime", *command[1:]], capture_output=True, text=True, cwd=here, env=environment
    )
    assert again.stdout == done.stdout, "a plan that was made before is the same"
    assert "frugal.dryrun.planner" in again.stderr and "torch" not in again.stderr and "numpy" not in again.stderr
