"""`frugal train --max-restarts`: what is started again, what is not, and what is said."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.plans import plan_by_hand
from frugal.config.run_settings import RunSettings
from frugal.distributed.first_failure import FailureReport
from frugal.launch import local, node, restart
from frugal.launch.restart import RunEnd, judge


def said(rank: int, code: int, text: str) -> FailureReport:
    return FailureReport(rank=rank, host="here", code=code, text=text)


BUG = said(1, 1, "Traceback (most recent call last):\n  File\nKeyError: 3\n(rank 1 on here)")
LOST = said(0, 1, "error: rank 1 is gone\n  because its connection is closed")
FULL = said(1, 6, "error: cannot write the checkpoint")
TAKEN = said(0, 2, "error: port 29501 cannot be used\n  because Address already in use")


@pytest.mark.parametrize(
    ("code", "report", "expected"),
    [
        (0, None, (0, "the run ended without a message from its ranks", True)),
        (1, None, (1, "the run ended without a message from its ranks", False)),
        (247, LOST, (137, "a rank was ended by SIGKILL", False)),
        (-9, None, (137, "a rank was ended by SIGKILL", False)),
        (-35, None, (163, "a rank was ended by signal 35", False)),
        (221, LOST, (163, "a rank was ended by signal 35", False)),
        (163, None, (163, "a rank was ended by signal 35", False)),
        (-64, None, (192, "a rank was ended by SIGRTMAX", False)),
        (-33, None, (161, "a rank was ended by signal 33", False)),
        (1, BUG, (1, "rank 1 failed (KeyError: 3)", False)),
        (1, LOST, (1, "rank 1 is gone", False)),
        (1, FULL, (6, "cannot write the checkpoint", True)),
        (2, TAKEN, (2, "port 29501 cannot be used", False)),
        (130, None, (130, "interrupted", True)),
        (2, None, (2, "exit code 2", True)),
    ],
)
def test_what_the_ranks_reported_decides(
    code: int, report: FailureReport | None, expected: tuple[int, str, bool], tmp_path: Path
) -> None:
    end = judge(code, report, tmp_path)
    assert (end.code, end.why, end.is_final) == expected


def test_a_folder_says_how_far_a_run_came(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "step", "step": 7}\n{"event": "step", "st')
    (tmp_path / "checkpoints" / "step-000005").mkdir(parents=True)
    end = judge(-9, None, tmp_path)
    assert (end.step, end.checkpoint) == (7, "step-000005")


def test_an_exit_code_of_0_without_a_word_from_the_ranks_is_a_failure(tmp_path: Path) -> None:
    plan = plan_by_hand(world_size=2, global_batch=2, micro_batch=1, zero_stage=2)
    settings = RunSettings(out=tmp_path)
    assert local.run_reported(plan, settings, lambda *_: 0) == (1, None)  # as launchers say of ranks that were killed


def killed(step: int, checkpoint: str | None = "step-000002", why: str = "a rank was ended by SIGKILL") -> RunEnd:
    return RunEnd(137, why, False, step, checkpoint)


FINE = RunEnd(0, "", True, 9, "step-000009")
GONE = "a rank was ended by SIGKILL"


def again(number: int, after: int, then: str = "resuming from step-000002") -> str:
    return f"restart {number} of 2: {GONE} after step {after}; {then}"


USED_UP = (
    f"error: {GONE}, and all 2 restarts are used up\n  because somebody sent it, or Linux: `dmesg` says which "
    "processes it ended for want of host memory\n\nhint: continue from step-000002 with --resume"
)


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ([FINE], 0, []),
        ([killed(3), FINE], 0, [again(1, 3)]),
        ([killed(1, None), FINE], 0, [again(1, 1, "starting over, as there is no checkpoint")]),
        ([killed(3)] * 2, 137, [again(1, 3), f"error: {GONE} again, after step 3 as before: not started again"]),
        ([killed(3), killed(4), killed(5)], 137, [again(1, 3), again(2, 4), USED_UP]),
    ],
)
def test_a_run_is_started_again_as_often_as_it_may(
    ends: list[RunEnd],
    code: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    coming: Iterator[RunEnd] = iter(ends)
    resumed = []

    def start(_plan: Any, settings: RunSettings) -> tuple[int, None]:
        resumed.append(settings.resume)
        return 0, None

    monkeypatch.setattr(restart, "judge", lambda *_: next(coming))
    plan = plan_by_hand(world_size=2, global_batch=2, micro_batch=1, zero_stage=2)
    assert restart.supervise(start, plan, RunSettings(out=tmp_path), 2, lambda before: before) == code
    assert capsys.readouterr().err == "".join(line + "\n" for line in said)
    assert next(coming, None) is None
    assert resumed == [False, *(end.checkpoint is not None for end in ends[:-1])]


def test_a_rank_that_is_ended_by_a_signal_without_a_name_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node, "LEAVE_SECONDS", 0.1)
    plan = plan_by_hand(world_size=2, global_batch=2, micro_batch=1, zero_stage=2)
    started = []

    def start(_plan: Any, _settings: RunSettings) -> tuple[int, None]:
        started.append(local.start_ranks("cpu", 2, "tests.launch.rank_program", ["1"]) if not started else 0)
        return started[-1], None

    assert restart.supervise(start, plan, RunSettings(out=tmp_path), 2, lambda before: before) == 0
    assert started == [-(signal.SIGRTMIN + 1), 0]
    assert capfd.readouterr().err == (
        "restart 1 of 2: a rank was ended by signal 35 after step 0; starting over, as there is no checkpoint\n"
    )
