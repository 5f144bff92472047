"""Slices that are written instead of run leave the recording that running all of them does, event for event."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.plans import plan_by_hand
from frugal.config.request import Request
from frugal.dryrun.messages import AskTrace, DryRun
from frugal.dryrun.trace import recorder
from frugal.dryrun.trace.recorder import Tracker
from frugal.dryrun.trace.trace import trace
from frugal.models.objectives import CausalLM
from frugal.models.tiling import slices
from frugal.planning.memory.timeline import ModelTrace, Timeline
from tests.dryrun.test_trace import build
from tests.dryrun.test_truth import dry_run_of

LENGTH = 1000  # in layers of 64 elements: 16 slices, the last one shorter
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_positions": LENGTH, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gemma2": {},
}


def both(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Yield what is made with slices that are written, and with all of them run; a fourth as many are run for the
    first."""
    num_run = []

    def counted(starts: range, watch: slices.Watch) -> Any:
        for start in watch(starts):
            num_run[-1] += 1
            yield start

    watch, results = slices.watch, []
    for most in (recorder.NUM_RUN, LENGTH):
        num_run.append(0)
        with monkeypatch.context() as patch:
            patch.setattr(recorder, "NUM_RUN", most)
            patch.setattr(slices, "watch", lambda own: watch(own and (lambda starts: counted(starts, own))))
            results.append(make())
    few, all_of_them = num_run
    assert few * 16 == all_of_them * (recorder.NUM_RUN + 1)
    return results[0], results[1]


@pytest.mark.parametrize(
    ("family", "mode", "mlp", "stage", "shared_by"),
    [
        ("llama", "full", "tiled", 3, 2),
        pytest.param("llama", "offloaded", "tiled", 3, 1, marks=pytest.mark.exhaustive),
        pytest.param("gpt2", "off", "tiled", 2, 1, marks=pytest.mark.exhaustive),
        pytest.param("llama", "full", "tiled", 2, 1, marks=pytest.mark.exhaustive),
        pytest.param("gemma2", "full", "plain", 3, 1, marks=pytest.mark.exhaustive),
        pytest.param("gpt2", "full", "tiled", 3, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_trace_with_written_slices_is_the_whole_one(
    family: str, mode: Any, mlp: Any, stage: int, shared_by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def traced() -> ModelTrace:
        asked = AskTrace(
            request=Request(seq_len=LENGTH * shared_by), kind="cuda", loss="tiled", mlp=mlp,
            activation_checkpointing=mode, zero_stage=stage, sequence_parallel=shared_by,
        )  # fmt: skip
        return trace(build(family, **FAMILIES[family]), CausalLM(), asked)

    written, whole = both(traced, monkeypatch)
    assert written == whole


@pytest.mark.parametrize(
    ("stage", "mode", "offload"),
    [(3, "full", "cpu"), pytest.param(2, "offloaded", "none", marks=pytest.mark.exhaustive)],
)
def test_a_dry_run_with_written_slices_is_the_whole_one(
    stage: int, mode: Any, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_by_hand(
        world_size=2, global_batch=8, micro_batch=2, zero_stage=stage,
        request={"precision": "bf16", "seq_len": LENGTH},
        strategy={"activation_checkpointing": mode, "loss": "tiled", "mlp": "tiled", "offload_optimizer": offload,
                  "overlap_comm": True},
    )  # fmt: skip

    def made() -> DryRun:
        return dry_run_of(plan, partial(build, "llama", num_hidden_layers=2), kind="cuda")

    written, whole = both(made, monkeypatch)
    assert deaths_sorted(written.timeline) == deaths_sorted(whole.timeline)
    assert replace(written, timeline=whole.timeline) == whole


def deaths_sorted(stream: Timeline) -> Timeline:
    """With neighbouring deaths sorted: DeepSpeed releases a module's parameters in the order of a set."""
    events: list[int] = []
    for are_births, group in groupby(zip(stream.events, stream.is_birth.tolist(), strict=True), lambda each: each[1]):
        numbers = [number for number, _ in group]
        events += numbers if are_births else sorted(numbers)
    return replace(stream, events=tuple(events))


def recorded(slice_of: Callable[[int, list[Tensor]], Any], width: int = 8) -> tuple[int, Timeline]:
    """Return how many of 16 slices of one row are run, each by `slice_of`, and the timeline."""
    num_run = 0
    with Tracker("cuda") as tracker:
        values = torch.zeros((1, 16, width), device="meta")
        tracker.watch(torch.nn.Identity())
        kept: list[Tensor] = []
        for start in slices.starts(values, 1, 1):
            num_run += 1
            slice_of(start, kept)
        kept.clear()
        del values
    return num_run, tracker.timeline()


def test_what_lives_into_the_next_slice_ends_there_in_the_last_one_too() -> None:
    def slice_of(_: int, kept: list[Tensor]) -> None:
        kept[:] = [torch.zeros(600, device="meta")]

    num_run, stream = recorded(slice_of)
    assert num_run == 4
    assert stream.events == (0, *(number for i in range(15) for number in (i + 1, i)), 15)


@pytest.mark.parametrize(
    "slice_of",
    [
        lambda start, kept: kept.append(torch.zeros(600, device="meta")),
        lambda start, kept: torch.zeros(600 + 8 * (start % 2), device="meta"),
        lambda start, kept: kept.__setitem__(slice(None), [*kept[-2:], torch.zeros(600, device="meta")]),
    ],
    ids=["kept to the end", "two kinds in turn", "kept for three slices"],
)
def test_slices_that_are_not_like_the_one_before_are_all_run(slice_of: Callable[[int, list[Tensor]], Any]) -> None:
    num_run, stream = recorded(slice_of)
    assert num_run == 16
    assert (len(stream.fixed), len(stream.events)) == (16, 32)


def test_slices_that_begin_where_others_are_not_aligned_are_all_run() -> None:
    assert recorded(lambda *_: torch.zeros(600, device="meta"), width=7)[0] == 16
