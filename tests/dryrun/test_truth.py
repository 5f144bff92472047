"""A dry run on meta tensors takes the memory of the real run: real weights, real DeepSpeed, real ranks."""

import functools
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.hardware.cluster import DeviceKind
from frugal.config.optimizers import Optimizer
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.dryrun.messages import AskDryRun, DryRun
from frugal.dryrun.run import dry_run
from frugal.engine.measure.two_steps import trial
from frugal.models.objectives import CausalLM, MaskedLM, Seq2Seq, SummedLoss
from frugal.planning.plan import Plan
from tests.engine.small_models import tiny_gpt2
from tests.kernels import needs_adams, needs_cpu_adam

needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


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
    world_size: int, micro_batch: int, accumulation_steps: int, zero_stage: int, precision: str, mode: str,
    strategy: dict[str, Any] | None = None, **request: Any,
) -> Plan:  # fmt: skip
    return plan_by_hand(
        world_size=world_size, global_batch=world_size * micro_batch * accumulation_steps, micro_batch=micro_batch,
        zero_stage=zero_stage, request={"precision": precision, "seq_len": SEQ_LEN, **request},
        strategy={"activation_checkpointing": mode, **SMALL_BUCKETS, **(strategy or {})},
    )  # fmt: skip


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


MIXED = "budget"
FULL_OFF, FULL_SELECTIVE = (("full", 1), ("off", 1)), (("full", 1), ("selective", 1))
ON_HOST, OVERLAPPED, TILED = {"offload_optimizer": "cpu"}, {"overlap_comm": True}, {"mlp": "tiled"}
HALF, FEW, MANY = Optimizer(states="bf16"), {"reduce_bucket_elements": 2_000}, {"reduce_bucket_elements": 400_000}
EIGHT_BIT, COMPILED = Optimizer(name="adamw-8bit"), Optimizer(implementation="deepspeed")


def row(
    family: str, ranks: int, steps: int, zero_stage: int, precision: str, mode: str = "off",
    strategy: dict[str, Any] | None = None, *, marks: Any = (), **request: Any,
) -> Any:  # fmt: skip
    """A model, and the plan that it is trained with in micro-batches of 4."""
    how = f"{family} x{ranks} {steps} steps zero{zero_stage} {precision} {mode} {strategy or ''} {request or ''}"
    return pytest.param(
        family, plan_for(ranks, 4, steps, zero_stage, precision, mode, strategy, **request), marks=marks, id=how
    )


def tried(optimizer: Optimizer, zero_stage: int, strategy: dict[str, Any] | None = None, *marks: Any) -> Any:
    """The row of an optimizer on one rank."""
    return row("gpt2", 1, 1, zero_stage, "bf16", "off", strategy, marks=marks, optimizer=optimizer)


IN_EVERY_RUN = [
    *(row("gpt2", 2, 3, stage, "fp32", mode) for stage, mode in ((0, "off"), (1, "full"), (2, "full"), (3, "off"))),
    *(row("gpt2", 2, 3, stage, "bf16", mode) for stage, mode in ((2, "off"), (3, "full"))),
    row("llama", 3, 1, 2, "bf16", "full"),  # with a rank in the middle
    row("llama", 1, 1, 2, "bf16", "full"),
    row("bert", 1, 1, 2, "bf16"),
    # Not so for parameters: a CPU rank is its own host, and what would be a copy to the device is none there.
    *(row("gpt2", 1, 3, stage, "bf16", "off", ON_HOST) for stage in (2, 3)),
    row("llama", 2, 3, 3, "bf16", "full", TILED),  # ZeRO-3 gathers the MLP at once
    row("gpt2", 2, 3, 2, "bf16", "off", OVERLAPPED),
    row("gpt2", 2, 1, 3, "bf16", "off", FEW | OVERLAPPED),
    row("llama", 2, 1, 2, "bf16", "selective"),
    row("gpt2", 2, 3, 2, "fp32", MIXED, {"layer_modes": FULL_OFF}),
    row("t5", 2, 1, 3, "bf16", MIXED, {"layer_modes": (("full", 2), ("selective", 1), ("off", 1))}),
    tried(Optimizer(implementation="foreach"), 2),
    tried(Optimizer(implementation="for-loop"), 3),
    tried(Optimizer(name="sgd", momentum=0.9), 2),
    tried(HALF, 3),
    tried(COMPILED, 2, None, needs_adams),
    tried(COMPILED, 3, ON_HOST, needs_adams),
    *(tried(HALF, stage, ON_HOST, needs_cpu_adam) for stage in (2, 3)),
    tried(EIGHT_BIT, 3, None, needs_bitsandbytes),
    tried(EIGHT_BIT, 2, ON_HOST, needs_bitsandbytes),
]
IN_TEST_ALL = [
    *(row("gpt2", ranks, steps, stage, precision, mode)
      for precision, stages in (("fp32", (0, 1, 2, 3)), ("bf16", (2, 3))) for stage in stages
      for ranks in (1, 2) for steps in (1, 3) for mode in ("off", "full")),
    *(row(family, 1, 1, 2, precision, mode) for family in ("llama", "packed llama", "bert", "t5")
      for precision in ("fp32", "bf16") for mode in ("off", "full")),
    *(row("gpt2", 1, 1, stage, "bf16", "off", ON_HOST) for stage in (2, 3)),
    *(row("llama", 1, 3, 3, "bf16", mode, TILED) for mode in ("off", "full")),
    row("llama", 2, 3, 3, "bf16", "off", TILED | {"max_live_elements": 1_000_000, "prefetch_bucket_elements": 100_000}),
    row("llama", 2, 3, 3, "bf16", MIXED, TILED | {"layer_modes": FULL_OFF}),
    row("llama", 2, 3, 3, "bf16", "full", TILED | {"sequence_parallel": 2}),
    *(row("gpt2", 2, steps, 1, "fp32", "off", OVERLAPPED) for steps in (1, 3)),
    *(row("gpt2", 2, steps, stage, "bf16", "off", OVERLAPPED) for stage, steps in ((2, 1), (3, 1), (3, 3))),
    row("gpt2", 2, 2, 0, "fp32", gradient_clipping=0.0),
    *(row("gpt2", 2, 2, stage, "bf16", gradient_clipping=0.0) for stage in (2, 3)),
    *(row("gpt2", 2, 1, stage, "bf16", "off", more) for stage, more in ((2, FEW), (2, MANY | OVERLAPPED), (3, MANY))),
    row("t5", 2, 3, 3, "bf16", "selective"),
    row("gpt2", 2, 3, 0, "fp32", "selective"),
    row("bert", 2, 1, 3, "fp32", "selective"),
    row("llama", 2, 1, 0, "fp32", MIXED, {"layer_modes": (("selective", 1), ("off", 1))}),
    row("bert", 2, 3, 1, "fp32", MIXED, {"layer_modes": FULL_SELECTIVE}),
    row("llama", 2, 3, 3, "fp32", MIXED, {"layer_modes": FULL_OFF}),
    row("t5", 2, 3, 2, "fp32", MIXED, {"layer_modes": (("full", 3), ("off", 1))}),
    tried(Optimizer(name="sgd"), 3),
    tried(HALF, 2),
    tried(Optimizer(states="bf16", name="sgd", momentum=0.9), 2),
    tried(COMPILED, 3, None, needs_adams),
    tried(COMPILED, 2, ON_HOST, needs_adams),
    tried(EIGHT_BIT, 2, None, needs_bitsandbytes),
]  # fmt: skip


def more_of(rows: list[Any], known: list[Any]) -> Iterator[Any]:
    """Yield those that are not in every run, marked so."""
    ids = {each.id for each in known}
    yield from (pytest.param(*each.values, marks=(*each.marks, exhaustive), id=each.id)
                for each in rows if each.id not in ids)  # fmt: skip


@pytest.mark.parametrize(("family", "plan"), [*IN_EVERY_RUN, *more_of(IN_TEST_ALL, IN_EVERY_RUN)])
def test_every_phase_of_every_rank_is_as_dry_run(family: str, plan: Plan, request: pytest.FixtureRequest) -> None:
    ranks: Ranks = request.getfixturevalue({1: "one_rank", 2: "two_ranks", 3: "three_ranks"}[plan.batch.world_size])
    assert_as_dry_run(plan, ranks, *FAMILIES[family])


def test_the_mask_that_keeps_packed_documents_apart_is_counted(one_rank: Ranks) -> None:
    plan = plan_for(1, 4, 1, 2, "bf16", "off")
    packed = assert_as_dry_run(plan, one_rank, *FAMILIES["packed llama"])
    assert max(packed.phases.values()) > max(dry_run_of(plan, LLAMA).phases.values())


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_batch_norm_over_all_ranks_is_dry_run_as_that_over_one(kind: DeviceKind) -> None:
    def peaks(norm: nn.Module) -> list[int]:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Flatten(), nn.Linear(8 * 14 * 14, 1))
        objective = SummedLoss(lambda model, batch: model(batch["x"]).sum(), example={"x": torch.zeros(3, 16, 16)})
        plan = plan_for(2, 4, 1, 2, "fp32", "off")
        found = dry_run_of(plan, lambda: model.to("meta"), lambda: objective, rank=1, kind=kind)
        return [interval.peak_bytes for interval in found.timeline.intervals(plan.batch.largest_micro_batch)]

    assert peaks(nn.SyncBatchNorm(8)) == peaks(nn.BatchNorm2d(8))


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_on_a_gpu_side_streams_hold_what_a_cpu_would_have_freed(zero_stage: int) -> None:
    """DeepSpeed's second bucket is in both; what CUDA adds is what the work before the last has not yet let go."""
    bucket_bytes = 2 * SMALL_BUCKETS["reduce_bucket_elements"]

    def backward_bytes(kind: DeviceKind, *, overlap_comm: bool) -> int:
        plan = plan_for(2, 1, 1, zero_stage, "bf16", "off", {"overlap_comm": overlap_comm}, seq_len=8)
        return dry_run_of(plan, kind=kind).phases["backward"]

    kinds: tuple[DeviceKind, ...] = ("cuda", "cpu")
    on_gpu, on_cpu = (
        backward_bytes(kind, overlap_comm=True) - backward_bytes(kind, overlap_comm=False) for kind in kinds
    )
    assert on_cpu + bucket_bytes // 2 <= on_gpu <= on_cpu + 6 * bucket_bytes
