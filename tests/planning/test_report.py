"""A plan in a few lines, the strategies that were weighed as a table, and why none fits as a proof."""

import re
from dataclasses import replace
from typing import Any

import pytest

from bench.plans import plan_by_hand
from frugal.errors import NothingFitsError
from frugal.planning.plan import Plan, Rejected, StepTime
from frugal.planning.report import bar, strategy_table
from frugal.planning.strategy import Strategy
from frugal.units import format_bytes
from tests.planning.synthetic import planned

GIB = 1 << 30
TIMES = dict.fromkeys(
    ("compute_seconds", "recompute_seconds", "communication_seconds", "offload_seconds", "optimizer_seconds"), 0.0
)


def seconds(total: float, **parts: float) -> StepTime:
    """A step that only computes, but for `parts`."""
    return StepTime(**(TIMES | {"compute_seconds": total - sum(parts.values())} | parts), total_seconds=total)


def by_hand() -> Plan:
    """A plan of 2 x 4 steps of 2 seconds; one strategy is slower, one was only drafted, one does not fit."""
    made = plan_by_hand(world_size=2, global_batch=16, micro_batch=2, zero_stage=2)
    slower = Rejected(
        strategy=Strategy(zero_stage=3), micro_batch=1, reason="slower", headroom_bytes=3 * GIB, step_seconds=3.0,
        accumulation_steps=8, peak_bytes=5 * GIB, time=seconds(3.0, communication_seconds=1.5),
    )  # fmt: skip
    drafted = Rejected(
        strategy=Strategy(zero_stage=2, activation_checkpointing="full"), micro_batch=8, reason="cannot be faster",
        headroom_bytes=None, step_seconds=2.5, accumulation_steps=1, peak_bytes=GIB,
        time=seconds(2.5, recompute_seconds=0.5), is_bound=True,
    )  # fmt: skip
    too_much = Rejected(
        strategy=Strategy(zero_stage=0, loss="tiled"), micro_batch=1, reason="does not fit", headroom_bytes=-GIB,
        step_seconds=None, peak_bytes=9 * GIB, is_bound=True,
    )  # fmt: skip
    return replace(made, time=seconds(2.0), rejected=(drafted, slower, too_much))


def test_every_strategy_has_a_row_with_time_batch_and_room() -> None:
    assert strategy_table(by_hand()).lines == [
        "strategies",
        "    step         batch       peak    headroom",
        "   2.0 s  1.00x  2 x 4    0.0 MiB    8.00 GiB  ZeRO-2: chosen",
        "  >2.5 s  1.25x  8 x 1  >1.00 GiB              ZeRO-2, full: recompute +500 ms",
        "   3.0 s  1.50x  1 x 8   5.00 GiB    3.00 GiB  ZeRO-3: communication +1.5 s",
        "       -             1  >9.00 GiB  <-1.00 GiB  ZeRO-0, tiled loss: does not fit",
        "  > lower bound, < upper bound: pruned, not fully evaluated; full, selective, offloaded: activation",
        "  checkpointing",
    ]


def test_a_report_shows_the_first_ones_and_counts_the_rest() -> None:
    assert "2 more: `frugal explain`" in strategy_table(by_hand(), shown=1).lines[-2]


def test_the_proof_names_every_level_with_its_number() -> None:
    with pytest.raises(NothingFitsError) as caught:
        planned(model={"parameters": 20_000_000_000}, gpus=4, mem="12G", host_mem="64G")
    lines = str(caught.value).splitlines()
    assert lines[0] == "gpt2 does not fit into a GPU of 12.00 GiB"
    assert lines[1:4] == [
        "  because on the GPUs alone ZeRO-2 lacks 101.01 GiB, ZeRO-3 at least 54.36 GiB",
        "  because with the optimizer in host memory ZeRO-2 lacks 26.51 GiB, ZeRO-3 234.02 GiB on the host",
        "  because with optimizer and parameters in host memory ZeRO-3 lacks 234.02 GiB on the host",
    ]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(gpus=4, mem="12G", global_batch=64)


def test_a_printed_plan_ends_with_the_verdict_in_a_few_lines(plan: Plan) -> None:
    lines = str(plan).splitlines()
    assert len(lines) == 6
    assert lines[0] == plan.arithmetic
    assert format_bytes(plan.memory.total_bytes) in str(plan) and str(plan.strategy) in str(plan)


def test_notes_come_before_the_verdict(plan: Plan) -> None:
    lines = str(replace(plan, warnings=("a", "b"))).splitlines()
    assert lines[:4] == ["note   a", "note   b", "", plan.arithmetic]
    assert lines[4].startswith("runs   ")


@pytest.mark.parametrize(
    ("mask_bytes_per_token", "asked", "micro_batches"),
    [(500_000, {"micro_batch": 2}, (2, 2)), (2_000_000, {}, (5, 1)), (30_000_000, {}, None)],
)
def test_a_plan_with_fused_kernels_says_what_they_bring(
    mask_bytes_per_token: int, asked: dict[str, Any], micro_batches: tuple[int, int] | None
) -> None:
    model: Any = {"mask_bytes_per_token": mask_bytes_per_token, "drafts": True}
    settings: Any = {"gpus": 4, "mem": "12G", "global_batch": 512, "pack": True, "activation_checkpointing": "off"}
    settings |= {"zero_stage": 2, "offload": "none", **asked}
    made = planned(model=model, **settings)
    if micro_batches is None:
        with pytest.raises(NothingFitsError) as caught:
            planned(model=model, **settings, document_tokens=0)
        lacking = re.findall(r"lacks ([\d.]+ GiB)", str(caught.value))[0]
        said = f"without, micro-batch 1 does not fit ({lacking} short, predicted)"
    else:
        masks = planned(model=model, **settings, document_tokens=0)
        assert masks.kernels == "" and "kernels" not in dict(masks.verdict)
        assert (made.batch.largest_micro_batch, masks.batch.largest_micro_batch) == micro_batches
        less = 100 * (1 - made.time.total_seconds / masks.time.total_seconds)
        less_bytes = mask_bytes_per_token * made.request.seq_len * made.batch.largest_micro_batch
        said = f"{less:.0f} % less time, {format_bytes(less_bytes)} less (predicted)"
    assert f"kernels are varlen attention: {said}" in made.why
    assert ("kernels", f"varlen attention: {said}") in made.verdict


CAPABILITIES = {
    "t4-16g": 7.5, "a100-80g": 8.0, "rtx3060-12g": 8.6, "l40s-48g": 8.9, "h100-80g": 9.0, "h200-141g": 9.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [(gpu, each) for gpu in CAPABILITIES for each in ("bf16", "fp16", "fp32") if (gpu, each) != ("t4-16g", "bf16")],
)
def test_a_plan_tells_how_experts_are_multiplied(gpu: str, precision: str) -> None:
    """As emulated cards answered `torch.nn.functional.grouped_mm` of four experts: one kernel, or four products."""
    number = CAPABILITIES[gpu]
    model = {"parameters": 10_000_000, "own_kernels": ("flash", "grouped_mm")}
    why = planned(model=model, gpus=1, gpu=gpu, global_batch=8, precision=precision).why
    how = "in one kernel" if number == 9.0 and precision == "bf16" else "one by one"
    because = f"torch's choice for {precision} on capability {number}"
    assert f"attention is flash: {because}" in why
    assert f"experts are multiplied {how} (grouped_mm): {because}" in why
    assert not any("experts" in each for each in planned(gpus=1, gpu=gpu, global_batch=8, precision=precision).why)


@pytest.mark.parametrize("width", [20, 73, 113])
def test_the_bar_is_as_wide_as_asked_and_true_to_a_column(plan: Plan, width: int) -> None:
    device = plan.cluster.devices[0].memory_bytes
    drawn = bar(plan.memory, device, width)
    assert sum(share for _, share in drawn) == width
    assert sum(part.size_bytes for part, _ in drawn) == device
    assert all(abs(share - part.size_bytes / device * width) < 1 for part, share in drawn)


def test_no_part_of_the_bar_is_told_by_its_colour_alone(plan: Plan) -> None:
    parts = [part for part, _ in bar(plan.memory, plan.device_bytes, 80)]
    assert len({part.letter for part in parts}) == len(parts)
    assert {part.name for part in parts} == {*plan.memory.CATEGORIES, "headroom", "margin"}


PARTS = {"drafts": True, "num_matrices": 200}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpus": 4, "mem": "24G", "sequence_parallel": 2, "model": {"can_be_split": True}}, "over 2 ranks"),
        (
            {"gpus": 4, "mem": "8G", "zero_stage": 3, "offload": "optimizer:0.5", "model": PARTS},
            "50 % of the optimizer",
        ),
        ({"gpus": 4, "mem": "24G", "mlp": "tiled", "model": {"mlp_bytes_per_token": 1000}}, "tiled MLP"),
    ],
)
def test_a_printed_plan_names_what_the_strategy_is(settings: dict[str, Any], words: str) -> None:
    made = planned(**settings)
    assert words in str(made) and made.arithmetic in str(made)


def test_a_notebook_shows_what_a_model_is_called_and_runs_none_of_it(plan: Plan) -> None:
    hostile = replace(plan, warnings=('<script>alert("x")</script>',))
    assert "<script" not in hostile._repr_html_() and "&lt;script&gt;" in hostile._repr_html_()
