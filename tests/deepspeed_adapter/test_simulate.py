"""DeepSpeed by arithmetic takes the memory that a dry run of DeepSpeed takes, in every phase."""

import random
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch

from frugal.config.adapters import Lora
from frugal.config.optimizers import Optimizer
from frugal.config.request import Request
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.deepspeed_adapter.simulate import mirrored
from frugal.deepspeed_adapter.simulate.engine import LAST_STEP, covers, equal_steps, simulate
from frugal.dryrun.messages import AskDryRun, AskTrace
from frugal.dryrun.run import dry_run
from frugal.dryrun.trace.trace import built, trace
from frugal.errors import RequestError
from frugal.models.objectives import CausalLM, MaskedLM, Seq2Seq, SummedLoss
from frugal.planning.memory.timeline import OPTIMIZER, OPTIMIZER_STEP, ModelTrace, Timeline
from frugal.planning.memory.workspaces import with_workspaces
from frugal.planning.strategy import Strategy

pytestmark = pytest.mark.skipif(not mirrored.verify_simulation(), reason="this DeepSpeed is dry-run instead")

TOLERANCE = 0.001  # of a phase's bytes; operators on scalars are left out, which is seen on models this small
RANDOM_STATES = 1 << 16  # bytes; each is 5 KB, and a layer that is recomputed keeps one: the simulation leaves them out
EIGHT_BIT_MAPS = 2 * 1024  # bytes, whatever the model
SEQ_LEN, MICRO_BATCH = 40, 4  # traced are 2 and 3 samples
VOCABULARY = 1000  # the embedding is most of a model

FAMILIES: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "llama": (
        "AutoModelForCausalLM",
        CausalLM,
        {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2},
    ),
    "mixtral": (  # adapters read experts' weights outside the module that has them
        "AutoModelForCausalLM",
        CausalLM,
        {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "gpt2": ("AutoModelForCausalLM", CausalLM, {"n_embd": 96, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "bert": (
        "AutoModelForMaskedLM",
        lambda: MaskedLM(pad_id=0, mask_id=999, vocab_size=VOCABULARY),
        {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "t5": (
        "AutoModelForSeq2SeqLM",
        lambda: Seq2Seq(0, start_id=0),
        {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
}  # fmt: skip

NF4 = "nf4 "
"""Before adapters around a base in 4 bits."""

FROZEN = "no adapters, but a frozen embedding"

TASKS = {"bert": "masked-lm", "t5": "seq2seq"}
SMALL_BUCKETS = {
    "reduce_bucket_elements": 20_000,  # less than the largest parameters
    "prefetch_bucket_elements": 10_000,
    "max_live_elements": 30_000,
    "persistence_threshold_elements": 100,
    "sub_group_elements": 50_000,
}


def builder(family: str, precision: str, lora: str | None = None) -> Callable[[], Any]:
    def build() -> Any:
        import transformers

        from frugal.models import adapters
        from frugal.models.loading import quantised

        auto, _, config = FAMILIES[family]
        made = transformers.AutoConfig.for_model(
            family, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False, **config
        )
        with torch.device("meta"):
            model = getattr(transformers, auto).from_config(made, dtype=DTYPES[precision]).train()
        if lora == FROZEN:
            model.model.embed_tokens.weight.requires_grad = False
        if lora in (None, FROZEN):
            return model
        task, meta = TASKS.get(family, "causal-lm"), torch.device("meta")
        if lora.startswith(NF4):
            model = quantised.apply(model, reference=family, dtype=DTYPES[precision])
        return adapters.add(model, Lora.of(lora.removeprefix(NF4)), task, dtype=DTYPES[precision], device=meta).train()

    return build


def asked_trace(strategy: Strategy, kind: str = "cuda") -> AskTrace:
    return AskTrace(
        request=Request(seq_len=SEQ_LEN), kind=kind, activation_checkpointing=strategy.activation_checkpointing,
        loss=strategy.loss, mlp=strategy.mlp, zero_stage=strategy.zero_stage,
    )  # fmt: skip


@cache
def traced(family: str, precision: str, lora: str | None, strategy: Strategy, kind: str) -> ModelTrace:
    """The trace of a model, which rows share that differ only in what DeepSpeed does."""
    model, building_bytes = built(builder(family, precision, lora))
    return trace(model, FAMILIES[family][1](), asked_trace(strategy, kind), building_bytes=building_bytes)


USUAL: dict[str, Any] = {
    "precision": "bf16", "world_size": 2, "rank": 0, "steps": 1, "kind": "cuda", "request": {}, "lora": None,
}  # fmt: skip
"""What a row says beside its strategy."""

OPTIMIZER_ON_HOST = {"offload_optimizer": "cpu"}
ALL_ON_HOST = {**OPTIMIZER_ON_HOST, "offload_parameters": "cpu"}
PART_ON_HOST = {**OPTIMIZER_ON_HOST, "offload_ratio": 0.25}
FULL = {"activation_checkpointing": "full"}

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"world_size": 1},
    "the last of two": {"world_size": 2, "rank": 1, "steps": 2, **FULL, **SMALL_BUCKETS},
    "one in between": {"world_size": 8, "rank": 3, "steps": 2, **FULL, "loss": "tiled"},
    "more ranks than a part needs": {"world_size": 64, "rank": 63, **FULL, **SMALL_BUCKETS},
}
OPTIMIZERS = (
    Optimizer(), Optimizer(states="bf16"), Optimizer(name="adamw-8bit"), Optimizer(name="sgd"),
)  # fmt: skip


def drawn(seed: int) -> tuple[str, int, dict[str, Any]]:
    """Return a family, a ZeRO stage and how it is trained: any that the simulation says it covers."""
    draw = random.Random(seed)
    while True:
        family, zero_stage = draw.choice(("llama", "llama", "llama", *FAMILIES)), draw.choice((0, 1, 2, 2, 3, 3, 3, 3))
        world_size, kind = draw.choice((1, 2, 3, 4, 8, 64)), draw.choice(("cuda", "cuda", "cpu"))
        request: dict[str, Any] = {
            "optimizer": draw.choice(OPTIMIZERS),
            "gradient_clipping": draw.choice((0.0, 1.0, 1.0)),
        }
        strategy: dict[str, Any] = {"activation_checkpointing": draw.choice(("off", "full", "full", "selective"))}
        strategy |= draw.choice(({}, SMALL_BUCKETS)) | draw.choice(({}, {}, OPTIMIZER_ON_HOST, ALL_ON_HOST))
        lora = draw.choice((None, None, "r=4", *((f"{NF4}r=4", FROZEN) if (family, kind) == ("llama", "cuda") else ())))
        if family in ("llama", "gpt2"):
            strategy |= draw.choice(({}, {"loss": "tiled"}, {} if lora or family == "gpt2" else {"mlp": "tiled"}))
        ratio = draw.choice((0.25, 0.5, 0.875))
        if zero_stage == 3 and OPTIMIZER_ON_HOST.items() <= strategy.items() and draw.random() < 0.5:
            strategy |= {
                "offload_parameters": "none",
                "offload_ratio": ratio,
                "sub_group_elements": 20_000 // world_size,
            }
            request |= {"offload": "optimizer", "offload_ratio": ratio}
        precision = draw.choice(("bf16", "bf16", "fp16", "fp32"))
        with suppress(RequestError, AssertionError):  # which no request and no strategy is
            asked = Request(precision=precision, seq_len=SEQ_LEN, **request)
            if covers(asked, Strategy(zero_stage=zero_stage, **strategy)):
                where: dict[str, Any] = {
                    "world_size": world_size,
                    "rank": draw.randrange(world_size),
                    "steps": draw.choice((1, 2)),
                }
                return (
                    family,
                    zero_stage,
                    where | {"kind": kind, "precision": precision, "lora": lora} | strategy | {"request": request},
                )


def states(timeline: Timeline) -> list[int]:
    """Return the bytes of what an optimizer makes in its first step and keeps, in the order in which it makes them, but
    for numbers of steps and the maps of 8-bit states: where each lies decides what is left between them."""
    sizes, left_out = timeline.sizes(MICRO_BATCH), (4, 8, EIGHT_BIT_MAPS // 2)
    first = next(events for phase, events in timeline.phase_ranges if phase == OPTIMIZER_STEP)
    made = [timeline.events[event] for event in first if timeline.is_birth[event]]
    kept = [each for each in made if timeline.categories[each] == OPTIMIZER and timeline.events.count(each) == 1]
    return [sizes[each] for each in kept if sizes[each] not in left_out]


IN_EVERY_RUN, NUMBER = 24, 120


@pytest.mark.parametrize(
    "row",
    [
        *(("llama", stage, {"precision": precision, **LAYOUTS[name]})
          for stage, precision, names in ((0, "fp32", ("alone", "one in between")), (2, "bf16", ("one in between",)),
                                          (3, "bf16", LAYOUTS)) for name in names),
        ("llama", 3, {"world_size": 4, "rank": 3, "activation_checkpointing": "offloaded", **SMALL_BUCKETS}),
        ("llama", 3, {"rank": 1, "steps": 2, **FULL, "mlp": "tiled"}),
        ("gpt2", 3, {"world_size": 3, "rank": 2, "kind": "cpu", "lora": f"{NF4}r=4", **SMALL_BUCKETS}),
        *(("llama", 3, {"lora": "r=4,dora", "world_size": ranks, **FULL, **SMALL_BUCKETS}) for ranks in (1, 3)),
        *(("bert", 3, {"kind": "cpu", "precision": precision, **SMALL_BUCKETS}) for precision in ("bf16", "fp32")),
        ("gpt2", 2, {"world_size": 3, "rank": 1, "steps": 2, "kind": "cpu", "precision": "fp16"}),
        ("llama", 3, {"world_size": 8, "rank": 3, **SMALL_BUCKETS, "sub_group_elements": 2_500, **PART_ON_HOST}),
        *(("mixtral", 3, {"lora": "r=4", **LAYOUTS[name]}) for name in ("alone", "the last of two", "one in between")),
        *(("mixtral", stage, {"lora": "r=4", "world_size": 3, "steps": 2, **mode, **SMALL_BUCKETS})
          for stage in (2, 3) for mode in ({}, FULL, {"activation_checkpointing": "selective"})),
        *(pytest.param(drawn(seed), id=f"seed {seed}") for seed in range(IN_EVERY_RUN)),
        *(pytest.param(drawn(seed), id=f"seed {seed}", marks=pytest.mark.exhaustive)
          for seed in range(IN_EVERY_RUN, NUMBER)),
    ], ids=str,
)  # fmt: skip
def test_every_phase_is_as_dry_run(row: tuple[str, int, dict[str, Any]]) -> None:
    """Peak and live bytes of every phase, host bytes, and the categories at the peak."""
    family, zero_stage, given = row
    how = USUAL | given
    precision, kind, lora, steps = (how[name] for name in ("precision", "kind", "lora", "steps"))
    where = {name: how[name] for name in ("world_size", "rank", "kind")}
    asked = Request(precision=precision, seq_len=SEQ_LEN, **how["request"])
    way = Strategy(zero_stage=zero_stage, **{name: value for name, value in how.items() if name not in USUAL})
    as_run = AskDryRun(request=asked, strategy=way, micro_batch=MICRO_BATCH, accumulation_steps=steps, **where)
    dry_run_result = dry_run(builder(family, precision, lora), FAMILIES[family][1](), as_run)
    of_model = Strategy(
        zero_stage=zero_stage, activation_checkpointing=way.activation_checkpointing, loss=way.loss, mlp=way.mlp
    )
    alone = traced(family, precision, lora, of_model, kind)
    assert covers(asked, way, alone)
    simulated = simulate(alone, asked, way, steps=equal_steps(steps > 1), **where)
    expected = dry_run_result.timeline.intervals(MICRO_BATCH)
    found = simulated.timeline.intervals(MICRO_BATCH)
    assert [interval.phase for interval in found] == [interval.phase for interval in expected]
    for one, other in zip(found, expected, strict=True):
        left_out = TOLERANCE * other.peak_bytes + (EIGHT_BIT_MAPS if asked.optimizer.name == "adamw-8bit" else 0)
        assert one.peak_bytes == pytest.approx(other.peak_bytes, abs=left_out), other.phase
        assert one.live_bytes == pytest.approx(other.live_bytes, abs=left_out), other.phase
    assert simulated.host_bytes == pytest.approx(dry_run_result.host_bytes, rel=TOLERANCE, abs=RANDOM_STATES)
    if kind == "cuda":
        emptied = [len(each.timeline.empties) for each in (simulated, dry_run_result)]
        assert emptied[0] == emptied[1] == (zero_stage > 0 and way.offload_parameters != "cpu")
    assert states(simulated.timeline) == states(dry_run_result.timeline)
    peak = dry_run_result.timeline.peak(MICRO_BATCH)
    for name, size_bytes in simulated.timeline.peak(MICRO_BATCH).categories.items():
        slack = max(left_out, TOLERANCE * peak.total_bytes)
        assert size_bytes == pytest.approx(peak.categories[name], abs=slack), name
    if zero_stage < 3 and steps > 1:
        last = simulate(alone, asked, way, steps=LAST_STEP, **where)
        assert (last.gathers, last.host_bytes) == (simulated.gathers, simulated.host_bytes)
        both = [with_workspaces(each.timeline, 1 << 23) for each in (last, simulated)]
        assert all(both[0].peak(samples) == both[1].peak(samples) for samples in (1, 2, 3, 5, 8, 64, 1000))


@pytest.mark.parametrize(
    ("request_", "strategy"),
    [
        ({"optimizer": Optimizer(implementation="for-loop")}, {}),
        ({"optimizer": Optimizer(name="sgd", momentum=0.9)}, {}),
        ({"optimizer": Optimizer(states="bf16", implementation="deepspeed")}, {}),
        ({}, {"overlap_comm": True}),
        ({"precision": "fp32"}, {"offload_optimizer": "cpu"}),
        ({}, {"gradient_accumulation_dtype": "bf16"}),
    ],
)
def test_what_is_not_simulated_is_said(request_: dict[str, Any], strategy: dict[str, Any]) -> None:
    assert covers(Request(), Strategy(zero_stage=2))
    assert not covers(Request(**request_), Strategy(zero_stage=2, **strategy))


class Reaching(torch.nn.Module):
    """A model that reads the weights of one module while another runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x @ self.first.weight + self.first(x))


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_parameter_read_outside_its_module_is_gathered_as_deepspeed_does(world_size: int) -> None:
    def build() -> torch.nn.Module:
        with torch.device("meta"):
            return Reaching().to(torch.bfloat16)

    goal = SummedLoss(
        lambda model, batch: model(batch["x"]).sum(), example={"x": torch.zeros(256, dtype=torch.bfloat16)}
    )
    way = Strategy(zero_stage=3, **SMALL_BUCKETS)
    alone = trace(build(), goal, asked_trace(way))
    assert covers(Request(), way, alone)
    how: dict[str, Any] = {"world_size": world_size, "rank": world_size - 1, "kind": "cuda"}
    as_run = AskDryRun(request=Request(), strategy=way, micro_batch=MICRO_BATCH, accumulation_steps=2, **how)
    found = simulate(alone, Request(), way, steps=equal_steps(True), **how).timeline.intervals(MICRO_BATCH)
    for one, other in zip(found, dry_run(build, goal, as_run).timeline.intervals(MICRO_BATCH), strict=True):
        assert (one.phase, one.peak_bytes) == (other.phase, pytest.approx(other.peak_bytes, abs=100))  # of scalars
