"""A dry run on meta tensors takes the memory of the real run: real weights, real DeepSpeed, real ranks."""

import functools
import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.hardware.cluster import DeviceKind
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.dryrun.messages import AskDryRun, DryRun
from frugal.dryrun.run import dry_run
from frugal.engine.measure.two_steps import trial
from frugal.models.objectives import CausalLM, MaskedLM, Seq2Seq, SummedLoss
from frugal.planning.plan import Plan
from tests.engine.small_models import tiny_gpt2


def made(auto: str, model_type: str, **config: Any) -> Any:
    """Build a transformers model."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, vocab_size=256, **config)
    return getattr(transformers, auto).from_config(config).train()


LLAMA = partial(
    made, "AutoModelForCausalLM", "llama", hidden_size=64, intermediate_size=160, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, use_cache=False,
)  # fmt: skip
FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "gpt2": (tiny_gpt2, CausalLM),
    "llama": (LLAMA, CausalLM),
    "packed llama": (LLAMA, partial(CausalLM, packed=True)),
    "bert": (
        partial(made, "AutoModelForMaskedLM", "bert", hidden_size=64, intermediate_size=160, num_hidden_layers=2,
                num_attention_heads=4),
        partial(MaskedLM, pad_id=0, mask_id=255, vocab_size=256),
    ),
    "t5": (
        partial(made, "AutoModelForSeq2SeqLM", "t5", d_model=64, d_kv=16, d_ff=160, num_layers=2, num_heads=4,
                use_cache=False, decoder_start_token_id=0),
        partial(Seq2Seq, 0, start_id=0),
    ),
}  # fmt: skip

exhaustive = pytest.mark.exhaustive
TOLERANCE = 0.005  # of the bytes measured
SEQ_LEN = 64
SMALL_BUCKETS = {
    "reduce_bucket_elements": 100_000,
    "prefetch_bucket_elements": 50_000,
    "max_live_elements": 60_000,
    "persistence_threshold_elements": 1_000,
}


def plan_for(
    world_size: int,
    micro_batch: int,
    accumulation_steps: int,
    zero_stage: int,
    precision: str,
    mode: str,
    strategy: dict[str, Any] | None = None,
) -> Plan:
    return plan_by_hand(
        world_size=world_size,
        global_batch=world_size * micro_batch * accumulation_steps,
        micro_batch=micro_batch,
        zero_stage=zero_stage,
        request={"precision": precision, "seq_len": SEQ_LEN},
        strategy={"activation_checkpointing": mode, **SMALL_BUCKETS, **(strategy or {})},
    )


def measured(plan: Plan, build: Callable[[], Any], objective: Callable[[], Any]) -> list[tuple[str, int, int]]:
    """(phase, peak bytes, live bytes) of every stretch of two real optimizer steps. Runs on ranks."""
    intervals = trial(lambda: build().to(DTYPES[plan.request.precision]), objective(), plan)
    return [(interval.phase, interval.peak_bytes, interval.live_bytes) for interval in intervals]


def dry_run_of(
    plan: Plan, build: Callable[[], Any] = tiny_gpt2, objective: Callable[[], Any] = CausalLM, *, rank: int = 0,
    kind: DeviceKind = "cpu",
) -> DryRun:  # fmt: skip
    """Return the dry run of one rank of a plan, of what `build` makes on the meta device."""

    def on_meta() -> Any:
        with torch.device("meta"):
            return build().to(DTYPES[plan.request.precision])

    asked = AskDryRun(
        request=plan.request, strategy=plan.strategy, micro_batch=plan.batch.largest_micro_batch,
        accumulation_steps=plan.batch.accumulation_steps, world_size=plan.batch.world_size, rank=rank, kind=kind,
    )  # fmt: skip
    return dry_run(on_meta, objective(), asked)


def once_more(check: Callable[..., Any]) -> Callable[..., Any]:
    """Run a check that measures ranks up to three times, each time after the first with new processes.

    On a busy machine gloo's threads may let go of a tensor later than `settled_collectives` waits, and processes that
    other tests used may hold what those left: both only raise what is measured.
    """

    @functools.wraps(check)
    def checked(plan: Plan, ranks: Ranks, *args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            with suppress(AssertionError):
                return check(plan, ranks, *args, **kwargs)
            ranks.close()  # the next call starts new ones
        return check(plan, ranks, *args, **kwargs)

    return checked


@once_more
def assert_as_dry_run(
    plan: Plan, ranks: Ranks, build: Callable[[], Any] = tiny_gpt2, objective: Callable[[], Any] = CausalLM,
    tolerance: float = TOLERANCE,
) -> DryRun:  # fmt: skip
    """Compare every phase of every rank: its peak, and what lives at its end. Return the dry run of the last rank."""
    for rank, truth in enumerate(ranks.run(measured, plan, build, objective)):
        found = dry_run_of(plan, build, objective, rank=rank)
        intervals = found.timeline.intervals(plan.batch.largest_micro_batch)
        assert [interval.phase for interval in intervals] == [phase for phase, *_ in truth]
        for interval, (phase, peak, live) in zip(intervals, truth, strict=True):
            assert (phase, interval.peak_bytes) == (phase, pytest.approx(peak, rel=tolerance))
            assert (phase, interval.live_bytes) == (phase, pytest.approx(live, rel=tolerance))
    return found


CASES = [
    *((stage, "fp32", mode, steps) for stage in (0, 1, 2, 3) for mode in ("off", "full") for steps in (1, 3)),
    *((stage, "bf16", mode, steps) for stage in (2, 3) for mode in ("off", "full") for steps in (1, 3)),
]
IN_EVERY_RUN = [
    *((0, "fp32", "off", 3), (1, "fp32", "full", 3)),
    *((2, "fp32", "full", 3), (2, "bf16", "off", 3), (3, "fp32", "off", 3), (3, "bf16", "full", 3)),
]
"""Each stage, and each mode with and without gradients in parts."""


@pytest.mark.parametrize(
    ("world_size", "zero_stage", "precision", "mode", "accumulation_steps"),
    [
        pytest.param(world_size, *case, marks=[] if world_size == 2 and case in IN_EVERY_RUN else exhaustive)
        for world_size in (1, 2)
        for case in CASES
    ],
)
def test_every_phase_of_every_rank_is_as_dry_run(
    world_size: int, zero_stage: int, precision: str, mode: str, accumulation_steps: int, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue({1: "one_rank", 2: "two_ranks"}[world_size])
    plan = plan_for(world_size, 4, accumulation_steps, zero_stage, precision, mode)
    assert_as_dry_run(plan, ranks)


def test_a_rank_in_the_middle_is_as_dry_run_too(three_ranks: Ranks) -> None:
    assert_as_dry_run(plan_for(3, 4, 1, 2, "bf16", "full"), three_ranks, LLAMA)


@pytest.mark.parametrize(
    ("family", "precision", "mode"),
    [
        pytest.param(*case, marks=[] if case in (("llama", "bf16", "full"), ("bert", "bf16", "off")) else exhaustive)
        for case in itertools.product(("llama", "packed llama", "bert", "t5"), ("fp32", "bf16"), ("off", "full"))
    ],
)
def test_so_it_is_for_other_families(family: str, precision: str, mode: str, one_rank: Ranks) -> None:
    """T5 is among the mixtures of `test_modes.py` in every run."""
    assert_as_dry_run(plan_for(1, 4, 1, 2, precision, mode), one_rank, *FAMILIES[family])


@pytest.mark.parametrize("accumulation_steps", [pytest.param(1, marks=exhaustive), 3])
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_so_it_is_where_optimizer_states_are_on_the_host(
    zero_stage: int, accumulation_steps: int, one_rank: Ranks
) -> None:
    """Not so for parameters: a CPU rank is its own host, and what would be a copy to the device is none there."""
    assert_as_dry_run(
        plan_for(1, 4, accumulation_steps, zero_stage, "bf16", "off", {"offload_optimizer": "cpu"}), one_rank
    )


def test_the_mask_that_keeps_packed_documents_apart_is_counted(one_rank: Ranks) -> None:
    plan = plan_for(1, 4, 1, 2, "bf16", "off")
    packed = assert_as_dry_run(plan, one_rank, *FAMILIES["packed llama"])
    assert max(packed.phases.values()) > max(dry_run_of(plan, LLAMA).phases.values())


@pytest.mark.parametrize(
    ("world_size", "mode", "strategy"),
    [
        (2, "full", {}),
        pytest.param(1, "off", {}, marks=exhaustive),
        pytest.param(1, "full", {}, marks=exhaustive),
        pytest.param(2, "off", {"max_live_elements": 1_000_000, "prefetch_bucket_elements": 100_000}, marks=exhaustive),
        pytest.param(2, "budget", {"layer_modes": (("full", 1), ("off", 1))}, marks=exhaustive),
        pytest.param(2, "full", {"sequence_parallel": 2}, marks=exhaustive),
    ],
)
def test_so_it_is_where_zero_3_gathers_a_tiled_mlp_at_once(
    world_size: int, mode: str, strategy: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue({1: "one_rank", 2: "two_ranks"}[world_size])
    plan = plan_for(world_size, 4, 3, 3, "bf16", mode, {"mlp": "tiled", **strategy})
    assert_as_dry_run(plan, ranks, LLAMA)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_batch_norm_over_all_ranks_is_dry_run_as_that_over_one(kind: DeviceKind) -> None:
    def peaks(norm: nn.Module) -> list[int]:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Flatten(), nn.Linear(8 * 14 * 14, 1))
        objective = SummedLoss(lambda model, batch: model(batch["x"]).sum(), example={"x": torch.zeros(3, 16, 16)})
        plan = plan_for(2, 4, 1, 2, "fp32", "off")
        found = dry_run_of(plan, lambda: model.to("meta"), lambda: objective, rank=1, kind=kind)
        return [interval.peak_bytes for interval in found.timeline.intervals(plan.batch.largest_micro_batch)]

    assert peaks(nn.SyncBatchNorm(8)) == peaks(nn.BatchNorm2d(8))
