"""Reading of a run's folder, whatever state it is in."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.runs import records
from frugal.checkpoint import run_folder
from frugal.config.run_settings import RunSettings
from frugal.report import after_run
from frugal.report.page import thinned
from frugal.report.run import read_run
from frugal.report.words import differing
from tests.commands import Capture, frugal
from tests.report.recorded import MIB, PLANNED, interrupted, plan, train


def kinds(folder: Path) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in read_run(folder).events]


def test_an_interrupted_run_tells_what_it_went_through(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "run")
    run = read_run(folder)
    assert [step.step for step in run.steps] == list(range(1, 13))
    assert kinds(folder) == [("start", 0), ("recovery", 6), ("failed", 10), ("restart", 8), ("done", 12)]
    assert run.restarts[0].dropped_steps == 2
    assert len(run.recoveries) == 1
    assert (run.state, run.last_step, run.notes) == ("done", 12, ())
    tokens, positions = 12 * 1008, sum(1200 + 10 * step for step in range(1, 13))
    assert run.padding_share == pytest.approx(1 - tokens / positions)


def test_memory_is_told_by_phase_as_it_was_recorded(tmp_path: Path) -> None:
    run = read_run(train(tmp_path / "run", plan(), range(1, 13)))
    for name, planned in PLANNED.items():
        phase = run.phases[name]
        assert (phase.planned_bytes, phase.measured_bytes, phase.reserved_bytes) == (
            planned, planned + MIB, planned + 9 * MIB
        )  # fmt: skip
    assert (run.phases["evaluation"].measured_bytes, run.phases["checkpoint"].planned_bytes) == (150 * MIB, None)


def test_lines_that_cannot_be_read_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", plan(), range(1, 13))
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    broken = [lines[0], b"\xff\xfe\n", b'{"event": "step", "step": "two"}\n', *lines[1:], b'{"event": "st']
    (folder / "metrics.jsonl").write_bytes(b"".join(broken))
    run = read_run(folder)
    assert [step.step for step in run.steps] == list(range(1, 13))
    assert run.notes == ("2 lines of metrics.jsonl cannot be read, and are left out",)


def test_a_run_of_an_earlier_version_is_told_with_what_it_lacks(tmp_path: Path, capsys: Capture) -> None:
    folder = train(tmp_path / "run", plan(), range(1, 13))
    known = ("event", "step", "loss", "targets", "samples", "learning_rate", "grad_norm", "tokens_per_second",
             "memory_bytes", "reserved_bytes", "planned_bytes", "measured_bytes", "time")  # fmt: skip
    old: list[dict[str, Any]] = [
        {name: value for name, value in record.items() if name in known}
        for record in records(folder)
        if record["event"] in ("step", "evaluation", "memory")
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in old))
    (folder / "plan.json").write_text('{"schema": 3}')
    code, output, errors = frugal(capsys, "report", str(folder))
    assert (code, errors) == (0, "")
    assert "note   plan.json: " in output and "what was planned is missing" in output
    assert "note   the run is of a version that did not record starts, ends, recoveries and padding" in output
    assert f"page   {folder}/report.html" in output


def test_a_run_that_goes_on_is_told_as_such(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", plan(), range(1, 6), is_ended=False)
    assert read_run(folder).state == "unknown"
    with run_folder.locked(RunSettings(out=folder)):
        assert read_run(folder).state_in_words == "still running after step 5 of 12"


@pytest.mark.parametrize(
    ("because", "state"),
    [
        ("a rank was ended by SIGKILL", "failed after step 5 of 12: a rank was ended by SIGKILL"),
        (after_run.INTERRUPTED, "interrupted after step 5 of 12"),
    ],
)
def test_who_started_a_killed_run_records_its_end_once_and_no_other_s(because: str, state: str, tmp_path: Path) -> None:
    before = time.time()
    folder = train(tmp_path / "run", plan(), range(1, 6), is_ended=False)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "st')  # killed in a line
    after_run.note_end(folder, time.time() + 60, "this start never began")
    assert kinds(folder) == [("start", 0)]
    for words in (because, "again"):
        after_run.note_end(folder, before, words)
    assert read_run(folder).state_in_words == state
    assert len(kinds(folder)) == 2 and kinds(folder)[1][1] == 5
    assert because in (folder / "report.html").read_text()


def test_a_page_that_cannot_be_written_fails_no_run_and_is_an_error_of_the_command(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = train(tmp_path / "run", plan(), range(1, 6))
    (folder / "report.html").mkdir()
    assert after_run.write_page(folder) is not None
    assert after_run.write_page(tmp_path / "nowhere") is not None
    code, _, errors = frugal(capsys, "report", str(folder), "-o", str(tmp_path / "nowhere" / "page.html"))
    assert code == 2
    assert errors.startswith(f"error: cannot write the page {tmp_path}/nowhere/page.html\n  because ")


def test_a_long_curve_keeps_its_extremes_and_a_short_one_everything() -> None:
    points = {float(x): float(x * 7919 % 10_007) for x in range(1, 100_001)}
    points[50_000.0], points[77_777.0] = -5.0, 1e9
    fewer = thinned(points, 1000)
    assert len(fewer) <= 1000
    assert fewer.items() <= points.items()
    assert (fewer[50_000.0], fewer[77_777.0], min(fewer), max(fewer)) == (-5.0, 1e9, 1.0, 100_000.0)
    assert thinned(fewer, 1000) == fewer


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: None, "there is no run in {}\n  because there is no such folder\n\nhint: give the --out"),
        (lambda path: path.write_text(""), "there is no run in {}\n  because it is a file\n\nhint: give the --out"),
        (lambda path: path.mkdir(), "{} is not a run's folder\n  because it has no metrics.jsonl\n"),
        (lambda path: (path.mkdir(), (path / "metrics.jsonl").write_text("not one\nnor two\n")),
         "no line of {}/metrics.jsonl is a record of a run\n"),
    ],
    ids=["nothing", "a file", "another folder", "records of something else"],
)  # fmt: skip
def test_what_is_no_run_is_refused(tmp_path: Path, capsys: Capture, make: Any, what: str) -> None:
    make(tmp_path / "run")
    code, output, errors = frugal(capsys, "report", str(tmp_path / "run"))
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: {what.format(tmp_path / 'run')}")


def test_runs_of_different_units_are_told_apart(tmp_path: Path, capsys: Capture) -> None:
    tokens = train(tmp_path / "tokens", plan(), range(1, 13))
    classes = train(tmp_path / "classes", plan("sequence-classification"), range(1, 13))
    code, output, _ = frugal(capsys, "report", str(tokens), str(classes), "-o", str(tmp_path / "page.html"))
    assert code == 0
    assert (
        "note   losses and speeds are of different units (tokens in target tokens, classes in samples): "
        "they are drawn apart, and not to be compared"
    ) in output


def test_what_differs_between_runs_is_told_and_nothing_else(tmp_path: Path, capsys: Capture) -> None:
    one = train(tmp_path / "a" / "run", plan(), range(1, 13))
    other = train(tmp_path / "b" / "run", plan(learning_rate=5e-4, weight_decay=0.2), range(1, 13), total_steps=20)
    code, output, _ = frugal(capsys, "report", "--json", str(one), str(other))
    told = json.loads(output)
    assert code == 0
    assert [run["name"] for run in told["runs"]] == [str(one), str(other)], "two of the same name"
    assert {each["name"]: each["values"] for each in told["differing"]} == {
        "learning rate": [f"{plan().request.scaled_learning_rate:g}", "0.0005"],
        "weight decay": [f"{plan().request.weight_decay:g}", "0.2"],
        "steps": ["12", "20"],
    }
    assert not (tmp_path / "a" / "run" / "report.html").exists(), "--json writes no page"


def test_of_two_strategies_each_thing_that_differs_is_a_row(tmp_path: Path) -> None:
    made = plan()
    mixed = replace(
        made.strategy, activation_checkpointing="budget", layer_modes=(("full", 9), ("off", 3)), zero_stage=3
    )
    kept = replace(mixed, offload_optimizer="cpu", offload_ratio=0.5)
    runs = [
        read_run(train(tmp_path / name, replace(made, strategy=strategy).sealed(), range(1, 4)))
        for name, strategy in (("one", mixed), ("other", kept), ("third", made.strategy))
    ]
    told = {name: tuple(values) for name, *values in differing(runs)}
    assert told["planned activation checkpointing"] == ("full for 9 of 12 layers", "full for 9 of 12 layers", "off")
    assert told["planned offload ratio"] == ("1.0", "0.5", "1.0")
    assert told["planned zero stage"] == ("3", "3", "2")
    assert not {"planned mlp", "planned sequence parallel"} & set(told)


def test_a_report_imports_no_torch(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", plan(), range(1, 6))
    program = (
        f"import sys; from frugal.cli import run; run(['report', {str(folder)!r}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert (folder / "report.html").exists()
