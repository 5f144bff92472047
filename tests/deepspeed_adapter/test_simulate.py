"""DeepSpeed by arithmetic takes the memory that a dry run of DeepSpeed takes, in every phase."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from frugal.config.adapters import Lora
from frugal.config.request import Request
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.deepspeed_adapter.simulate import mirrored
from frugal.deepspeed_adapter.simulate.engine import covers, simulate
from frugal.dryrun.messages import AskDryRun, AskTrace
from frugal.dryrun.run import dry_run
from frugal.dryrun.trace.trace import built, trace
from frugal.models.objectives import CausalLM, MaskedLM, Seq2Seq, SummedLoss
from frugal.planning.memory.timeline import ModelTrace
from frugal.planning.strategy import Strategy

pytestmark = pytest.mark.skipif(not mirrored.verify_simulation(), reason="this DeepSpeed is dry-run instead")

TOLERANCE = 0.001  # of a phase's bytes; operators on scalars are left out, which is seen on models this small
RANDOM_STATES = 1 << 16  # bytes; each is 5 KB, and a layer that is recomputed keeps one: the simulation leaves them out
EIGHT_BIT_MAPS = 2 * 1024 + 100  # bytes, whatever the model; and the usual scalars
SEQ_LEN, MICRO_BATCH = 40, 4  # traced are 2 and 3 samples
VOCABULARY = 1000  # the embedding is most of a model

FAMILIES: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "llama": (
        "AutoModelForCausalLM",
        CausalLM,
        {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2},
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
        if lora is None:
            return model
        task, meta = TASKS.get(family, "causal-lm"), torch.device("meta")
        if lora.startswith(NF4):
            model = quantised.apply(model, reference=family, dtype=DTYPES[precision])
        return adapters.add(
            model, Lora.parse(lora.removeprefix(NF4)), task, dtype=DTYPES[precision], device=meta
        ).train()

    return build


def traced(family: str, request: Request, strategy: Strategy, kind: str, lora: str | None) -> ModelTrace:
    model, building_bytes = built(builder(family, request.precision, lora))
    return trace(
        model,
        FAMILIES[family][1](),
        AskTrace(
            request=Request(seq_len=SEQ_LEN),
            kind=kind,
            activation_checkpointing=strategy.activation_checkpointing,
            loss=strategy.loss,
            mlp=strategy.mlp,
            zero_stage=strategy.zero_stage,
        ),
        building_bytes=building_bytes,
    )


def compare(
    family: str,
    zero_stage: int,
    *,
    precision: str = "bf16",
    world_size: int = 2,
    rank: int = 0,
    steps: int = 1,
    kind: str = "cuda",
    request: dict[str, Any] | None = None,
    lora: str | None = None,
    **strategy: Any,
) -> None:
    """Peak and live bytes of every phase, host bytes, and the categories at the peak."""
    asked = Request(precision=precision, seq_len=SEQ_LEN, **(request or {}))
    way = Strategy(zero_stage=zero_stage, **strategy)
    dry_run_result = dry_run(
        builder(family, precision, lora),
        FAMILIES[family][1](),
        AskDryRun(
            request=asked,
            strategy=way,
            micro_batch=MICRO_BATCH,
            accumulation_steps=steps,
            world_size=world_size,
            rank=rank,
            kind=kind,
            first_micro_steps=1,
        ),
    )
    alone = traced(family, asked, way, kind, lora)
    assert covers(asked, way, alone)
    simulated = simulate(alone, asked, way, world_size=world_size, rank=rank, accumulates=steps > 1, kind=kind)
    expected = dry_run_result.timeline.intervals(MICRO_BATCH)
    found = simulated.timeline.intervals(MICRO_BATCH)
    assert [interval.phase for interval in found] == [interval.phase for interval in expected]
    for one, other in zip(found, expected, strict=True):
        left_out = EIGHT_BIT_MAPS if asked.optimizer == "adamw-8bit" else 0
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=TOLERANCE, abs=left_out), other.phase
        assert one.live_bytes == pytest.approx(other.live_bytes, rel=TOLERANCE, abs=left_out), other.phase
    assert simulated.host_bytes == pytest.approx(dry_run_result.host_bytes, rel=TOLERANCE, abs=RANDOM_STATES)
    if kind == "cuda":
        emptied = [len(each.timeline.empties) for each in (simulated, dry_run_result)]
        assert emptied[0] == emptied[1] == (zero_stage > 0 and strategy.get("offload_parameters") != "cpu")
    peak = dry_run_result.timeline.peak(MICRO_BATCH)
    for name, size_bytes in simulated.timeline.peak(MICRO_BATCH).categories.items():
        slack = max(left_out, TOLERANCE * peak.total_bytes)
        assert size_bytes == pytest.approx(peak.categories[name], abs=slack), name


LAYOUTS = [(1, 0, 1), (2, 1, 2), (8, 3, 2), (64, 63, 1)]
"""World size, rank, micro-steps: alone, the last, one in between, and more ranks than a part needs."""


@pytest.mark.parametrize(("world_size", "rank", "steps"), LAYOUTS)
@pytest.mark.parametrize(
    ("family", "zero_stage", "precision"),
    [
        ("llama", 0, "fp32"),
        pytest.param("llama", 1, "fp32", marks=pytest.mark.exhaustive),
        ("llama", 2, "bf16"),
        pytest.param("llama", 2, "fp32", marks=pytest.mark.exhaustive),
        ("llama", 3, "bf16"),
        pytest.param("gpt2", 2, "bf16", marks=pytest.mark.exhaustive),
        pytest.param("gpt2", 3, "bf16", marks=pytest.mark.exhaustive),
    ],
)
def test_every_phase_is_as_dry_run(
    family: str, zero_stage: int, precision: str, world_size: int, rank: int, steps: int
) -> None:
    small = world_size in (2, 64)
    compare(
        family,
        zero_stage,
        precision=precision,
        world_size=world_size,
        rank=rank,
        steps=steps,
        activation_checkpointing="full" if rank else "off",
        loss="tiled" if world_size == 8 else "plain",
        **(SMALL_BUCKETS if small else {}),
    )


@pytest.mark.parametrize(
    ("zero_stage", "precision", "steps", "mode"),
    [
        (0, "fp32", 1, "full"),
        (2, "bf16", 2, "off"),
        (3, "bf16", 2, "full"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in ((1, "fp32", 2, "off"), (3, "fp32", 1, "off"), (3, "bf16", 2, "off"), (3, "bf16", 1, "full"))
        ),
    ],
)
def test_a_tiled_mlp_too(zero_stage: int, precision: str, steps: int, mode: str) -> None:
    compare("llama", zero_stage, precision=precision, rank=1, steps=steps, activation_checkpointing=mode, mlp="tiled")


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_bidirectional_models_and_shared_embeddings_too(family: str, zero_stage: int) -> None:
    compare(family, zero_stage, world_size=4, rank=3, steps=2, activation_checkpointing="full", **SMALL_BUCKETS)


@pytest.mark.parametrize(("zero_stage", "precision"), [(0, "fp32"), (2, "fp16"), (3, "fp32")])
def test_on_a_cpu_the_model_is_built_where_it_is_trained(zero_stage: int, precision: str) -> None:
    compare("gpt2", zero_stage, precision=precision, world_size=3, rank=1, steps=2, kind="cpu")


@pytest.mark.parametrize(("world_size", "rank", "steps"), [(1, 0, 2), (8, 3, 1)])
@pytest.mark.parametrize("states", ["fp32", pytest.param("bf16", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("ratio", [0.25, pytest.param(0.875, marks=pytest.mark.exhaustive)])
def test_a_part_of_the_optimizer_on_the_host_too(
    ratio: float, states: str, world_size: int, rank: int, steps: int
) -> None:
    compare(
        "llama",
        3,
        world_size=world_size,
        rank=rank,
        steps=steps,
        request={"optimizer_states": states},
        offload_optimizer="cpu",
        offload_ratio=ratio,
        **{**SMALL_BUCKETS, "sub_group_elements": 20_000 // world_size},
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world_size", "rank", "steps"), [(4, 3, 2), (64, 5, 1)])
@pytest.mark.parametrize("lora", [None, "r=4"])
def test_a_part_of_the_optimizer_on_the_host_with_adapters_too(
    lora: str | None, world_size: int, rank: int, steps: int
) -> None:
    compare(
        "llama",
        3,
        world_size=world_size,
        rank=rank,
        steps=steps,
        lora=lora,
        offload_optimizer="cpu",
        offload_ratio=0.5,
        activation_checkpointing="full",
        **{**SMALL_BUCKETS, "sub_group_elements": (2_000 if lora else 20_000) // world_size},
    )


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_without_states_and_without_clipping(zero_stage: int) -> None:
    compare(
        "llama", zero_stage, precision="fp32", request={"optimizer": "sgd", "gradient_clipping": 0.0}, **SMALL_BUCKETS
    )


@pytest.mark.parametrize(
    ("zero_stage", "precision", "kind", "offload"),
    [
        (0, "fp32", "cpu", {}),
        (2, "bf16", "cuda", {}),
        (3, "bf16", "cuda", {}),
        (2, "bf16", "cuda", {"offload_optimizer": "cpu"}),
    ],
)
def test_8_bit_states_are_in_blocks(zero_stage: int, precision: str, kind: str, offload: dict[str, Any]) -> None:
    compare(
        "llama", zero_stage, precision=precision, kind=kind, steps=2, request={"optimizer": "adamw-8bit"}, **offload,
        **SMALL_BUCKETS,
    )  # fmt: skip


OPTIMIZER_ON_HOST = {"offload_optimizer": "cpu"}
ALL_ON_HOST = {**OPTIMIZER_ON_HOST, "offload_parameters": "cpu"}


@pytest.mark.parametrize(
    ("zero_stage", "world_size", "rank", "steps", "kind", "offload"),
    [
        (2, 2, 1, 2, "cuda", OPTIMIZER_ON_HOST),
        pytest.param(2, 1, 0, 1, "cpu", OPTIMIZER_ON_HOST, marks=pytest.mark.exhaustive),
        (3, 8, 7, 2, "cuda", OPTIMIZER_ON_HOST),
        (3, 2, 0, 2, "cuda", ALL_ON_HOST),
        pytest.param(3, 1, 0, 1, "cuda", ALL_ON_HOST, marks=pytest.mark.exhaustive),
        (3, 2, 1, 1, "cpu", ALL_ON_HOST),
    ],
)
def test_what_is_offloaded_is_on_the_host_and_passes_through_the_device(
    zero_stage: int, world_size: int, rank: int, steps: int, kind: str, offload: dict[str, Any]
) -> None:
    compare("llama", zero_stage, world_size=world_size, rank=rank, steps=steps, kind=kind, **offload, **SMALL_BUCKETS)


@pytest.mark.parametrize(
    ("zero_stage", "world_size", "rank", "steps", "kind", "offload"),
    [
        (2, 2, 1, 2, "cuda", {}),
        (3, 8, 3, 2, "cuda", {}),
        (2, 2, 1, 2, "cuda", OPTIMIZER_ON_HOST),
        (3, 2, 0, 2, "cuda", ALL_ON_HOST),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                (2, 3, 1, 1, "cpu", {}),
                (3, 1, 0, 1, "cpu", {}),
                (2, 1, 0, 1, "cpu", OPTIMIZER_ON_HOST),
                (3, 2, 1, 1, "cuda", OPTIMIZER_ON_HOST),
                (3, 2, 1, 2, "cpu", ALL_ON_HOST),
            ]
        ),
    ],
)
def test_states_in_bf16_take_what_a_dry_run_takes(
    zero_stage: int, world_size: int, rank: int, steps: int, kind: str, offload: dict[str, Any]
) -> None:
    compare(
        "llama", zero_stage, world_size=world_size, rank=rank, steps=steps, kind=kind,
        request={"optimizer_states": "bf16"}, **offload, **SMALL_BUCKETS,
    )  # fmt: skip


@pytest.mark.parametrize(("zero_stage", "mode"), [(2, "selective"), (3, "selective"), (3, "offloaded")])
def test_other_modes_of_activation_checkpointing_too(zero_stage: int, mode: str) -> None:
    compare("llama", zero_stage, world_size=4, rank=3, activation_checkpointing=mode, **SMALL_BUCKETS)


@pytest.mark.parametrize(
    ("request_", "strategy"),
    [
        ({"optimizer_implementation": "for-loop"}, {}),
        ({"optimizer": "sgd", "momentum": 0.9}, {}),
        ({"optimizer_states": "bf16", "optimizer_implementation": "deepspeed"}, {}),
        ({}, {"overlap_comm": True}),
        ({"precision": "fp32"}, {"offload_optimizer": "cpu"}),
        ({}, {"gradient_accumulation_dtype": "bf16"}),
    ],
)
def test_what_is_not_simulated_is_said(request_: dict[str, Any], strategy: dict[str, Any]) -> None:
    assert covers(Request(), Strategy(zero_stage=2))
    assert not covers(Request(**request_), Strategy(zero_stage=2, **strategy))


LORA_BUCKETS = {**SMALL_BUCKETS, "persistence_threshold_elements": 2000}
"""peft asks for the type of weights that nobody has gathered, and DeepSpeed gathers them earlier from then on. Of usual
sizes they stay gathered anyway."""


@pytest.mark.parametrize(
    ("family", "world_size", "rank", "steps", "kind", "strategy"),
    [
        pytest.param("llama", 2, 0, 1, "cuda", {}, marks=pytest.mark.exhaustive),
        ("llama", 8, 3, 2, "cuda", {"activation_checkpointing": "full", "loss": "tiled"}),
        ("llama", 4, 3, 1, "cuda", {"activation_checkpointing": "selective", **LORA_BUCKETS}),
        pytest.param(
            "gpt2",
            4,
            1,
            2,
            "cuda",
            {"activation_checkpointing": "full", "loss": "tiled", **LORA_BUCKETS},
            marks=pytest.mark.exhaustive,
        ),
        ("llama", 8, 7, 2, "cuda", {**OPTIMIZER_ON_HOST, **LORA_BUCKETS}),
        ("llama", 2, 0, 2, "cuda", {**ALL_ON_HOST, "activation_checkpointing": "full", **LORA_BUCKETS}),
        pytest.param("llama", 2, 1, 1, "cpu", {**ALL_ON_HOST, **LORA_BUCKETS}, marks=pytest.mark.exhaustive),
        pytest.param("bert", 4, 3, 2, "cuda", {"activation_checkpointing": "full"}, marks=pytest.mark.exhaustive),
        pytest.param("t5", 4, 3, 2, "cuda", {"activation_checkpointing": "full"}, marks=pytest.mark.exhaustive),
        pytest.param("llama", 1, 0, 1, "cuda", {}, marks=pytest.mark.exhaustive),
        pytest.param("gpt2", 3, 2, 2, "cpu", LORA_BUCKETS, marks=pytest.mark.exhaustive),
    ],
)
def test_frozen_weights_with_adapters_too(
    family: str, world_size: int, rank: int, steps: int, kind: str, strategy: dict[str, Any]
) -> None:
    compare(family, 3, world_size=world_size, rank=rank, steps=steps, kind=kind, lora="r=4", **strategy)


@pytest.mark.parametrize(
    ("family", "zero_stage", "world_size", "rank", "steps", "kind", "strategy"),
    [
        ("llama", 2, 2, 1, 2, "cuda", {}),
        ("llama", 3, 2, 1, 2, "cuda", {**LORA_BUCKETS, "activation_checkpointing": "full"}),
        pytest.param("gpt2", 3, 3, 2, 1, "cpu", LORA_BUCKETS, marks=pytest.mark.exhaustive),
        pytest.param("llama", 3, 2, 0, 2, "cuda", {**ALL_ON_HOST, **LORA_BUCKETS}, marks=pytest.mark.exhaustive),
        pytest.param("llama", 3, 1, 0, 2, "cuda", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_weights_in_4_bits_with_adapters_too(
    family: str, zero_stage: int, world_size: int, rank: int, steps: int, kind: str, strategy: dict[str, Any]
) -> None:
    compare(family, zero_stage, world_size=world_size, rank=rank, steps=steps, kind=kind, lora=f"{NF4}r=4", **strategy)


def test_a_frozen_embedding_is_simulated() -> None:
    def build() -> Any:
        model = builder("llama", "bf16")()
        model.model.embed_tokens.weight.requires_grad = False
        return model

    for zero_stage in (2, 3):
        alone = trace(
            build(),
            CausalLM(),
            AskTrace(
                request=Request(seq_len=SEQ_LEN),
                kind="cuda",
                activation_checkpointing="off",
                loss="plain",
                zero_stage=zero_stage,
            ),
        )
        request, strategy = Request(seq_len=SEQ_LEN), Strategy(zero_stage=zero_stage, **SMALL_BUCKETS)
        assert covers(request, strategy, alone)
        dry_run_result = dry_run(
            build,
            CausalLM(),
            AskDryRun(
                request=request,
                strategy=strategy,
                micro_batch=MICRO_BATCH,
                accumulation_steps=1,
                world_size=2,
                rank=0,
                kind="cuda",
            ),
        )
        simulated = simulate(alone, request, strategy, world_size=2, rank=0, accumulates=False, kind="cuda")
        expected = dry_run_result.peak.total_bytes
        assert simulated.timeline.peak_bytes(MICRO_BATCH) == pytest.approx(expected, rel=TOLERANCE)


def test_a_parameter_used_outside_its_module_is_not_simulated_under_zero_3() -> None:
    class Reaching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x @ self.first.weight + self.first(x))

    with torch.device("meta"):
        model = Reaching().to(torch.bfloat16)
    goal = SummedLoss(
        lambda model, batch: model(batch["x"]).sum(), example={"x": torch.zeros(16, dtype=torch.bfloat16)}
    )
    for zero_stage, is_covered in ((2, True), (3, False)):
        alone = trace(
            model,
            goal,
            AskTrace(
                request=Request(seq_len=SEQ_LEN),
                kind="cuda",
                activation_checkpointing="off",
                loss="plain",
                zero_stage=zero_stage,
            ),
        )
        assert covers(Request(), Strategy(zero_stage=zero_stage), alone) is is_covered
