"""A trace of a few layers, spliced, is the trace of all layers."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from frugal.config.request import Request
from frugal.dryrun.messages import AskTrace
from frugal.dryrun.trace import trace as tracing
from frugal.dryrun.trace.trace import repetition, trace
from frugal.models.objectives import CausalLM, MaskedLM, Objective, Seq2Seq, SummedLoss
from frugal.planning.memory.profile import kernels_in
from frugal.planning.memory.timeline import MarkKind, ModelTrace, NotAffineError

SEQ_LEN = 40

SMALL = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "use_cache": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_hidden_layers": 8, "num_key_value_heads": 2},
    "gpt2": {"vocab_size": 500, "n_embd": 64, "n_layer": 8, "n_head": 2, "n_positions": 64, "use_cache": False},
    "gemma2": {**SMALL, "num_hidden_layers": 14, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 16},
    "bert": {**SMALL, "num_hidden_layers": 8},
    "qwen3_moe": {
        **SMALL, "num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 32,
        "num_experts": 8, "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        **SMALL, "num_hidden_layers": 14, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 16,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "t5": {
        "vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 7, "num_heads": 4, "use_cache": False,
        "decoder_start_token_id": 0,
    },
}  # fmt: skip


def build(family: str, **changes: Any) -> nn.Module:
    import transformers

    auto = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}.get(family, "AutoModelForCausalLM")
    config = transformers.AutoConfig.for_model(
        family, **{"bos_token_id": 0, "eos_token_id": 0, **FAMILIES[family], **changes}
    )
    with torch.device("meta"):
        return getattr(transformers, auto).from_config(config, dtype=torch.bfloat16).train()


def objective(family: str) -> Objective:
    if family == "bert":
        return MaskedLM(pad_id=0, mask_id=499, vocab_size=500)
    return Seq2Seq(0, start_id=0) if family == "t5" else CausalLM()


def traced(model: nn.Module, goal: Objective, **asked: Any) -> ModelTrace:
    """The trace of a GPU, of samples of `SEQ_LEN` tokens unless `asked` otherwise."""
    usual = {
        "request": Request(seq_len=asked.pop("seq_len", SEQ_LEN)), "kind": "cuda", "activation_checkpointing": "off",
        "loss": "plain", "zero_stage": 2,
    }  # fmt: skip
    return trace(model, goal, AskTrace(**(usual | asked)))


def refuse(*_: Any) -> Any:
    raise NotAffineError("refused")


def both(
    model: nn.Module, goal: Objective, monkeypatch: pytest.MonkeyPatch, **asked: Any
) -> tuple[ModelTrace | None, ModelTrace]:
    """The spliced trace, if there is one, and that of the whole model."""
    spliced = None
    with monkeypatch.context() as patch, suppress(NotAffineError):
        patch.setattr(tracing, "_whole", refuse)
        spliced = traced(model, goal, **asked)
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_spliced", lambda *_: None)
        return spliced, traced(model, goal, **asked)


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}, {"activation_checkpointing": "full", "loss": "tiled", "zero_stage": 3}),
    ("bert", {}, {"activation_checkpointing": "offloaded"}),
    ("llama", {}, {"activation_checkpointing": "selective"}),
    ("gpt_oss", {}, {"activation_checkpointing": "full"}),
    ("llama", {}, {"seq_len": 64, "activation_checkpointing": "full", "mlp": "tiled", "zero_stage": 3}),
]
MORE_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {}),
    ("gpt2", {}, {"loss": "tiled", "zero_stage": 3}),
    ("gpt2", {}, {"activation_checkpointing": "full", "zero_stage": 3}),
    ("gemma2", {}, {"loss": "tiled"}),
    ("qwen3_moe", {}, {"activation_checkpointing": "full"}),
    ("gpt_oss", {}, {}),
    ("llama", {}, {"seq_len": 64, "activation_checkpointing": "full", "mlp": "tiled"}),
]


@pytest.mark.parametrize(
    ("family", "changes", "asked"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE_CASES)],
)
def test_spliced_and_whole_traces_are_the_same(
    family: str, changes: dict[str, Any], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spliced, whole = both(build(family, **changes), objective(family), monkeypatch, **asked)
    assert spliced == whole
    assert bool(whole.gathered_as_one) == (asked.get("mlp") == "tiled" and asked.get("zero_stage") == 3)
    assert msgspec.json.decode(msgspec.json.encode(whole), type=ModelTrace) == whole


def test_scratch_that_is_no_multiple_of_the_samples_keeps_no_model_from_being_spliced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spliced, whole = both(build("llama"), CausalLM(), monkeypatch, seq_len=64)
    assert spliced == whole
    assert min(whole.stream.fixed) < 0  # what sums the embedding's gradient: a row for every ten tokens, rounded down


@pytest.mark.parametrize(
    ("family", "changes", "period"),
    [("gpt_oss", {}, (0, 2, 7)), ("qwen3_moe", {"mlp_only_layers": [0]}, (1, 1, 7))],
    ids=["alternating layers", "a first layer of another kind"],
)
def test_layers_repeat_in_periods(family: str, changes: dict[str, Any], period: tuple[int, int, int]) -> None:
    found = repetition(build(family, **changes))
    assert found is not None
    assert (found.first_layer, found.period, found.num_periods) == period


def test_layers_that_differ_in_a_setting_are_not_spliced() -> None:
    model = build("llama")
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.attention_dropout = number / 100
    assert repetition(model) is None


def layers() -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8))


class Collecting(nn.Module):
    """Keeps what every layer says, or counts them, so that a tensor outside the layers grows with their number."""

    def __init__(self, only_counts: bool) -> None:
        super().__init__()
        self.only_counts = only_counts
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(samples, 16)` to the same."""
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return x * x.new_ones(len(seen), 1, 16).sum(0) if self.only_counts else torch.stack(seen).sum(0)


class Short(nn.Module):
    """Counts its layers by itself, so that it fails where some are missing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(samples, 16)` to the same."""
        for number in range(8):
            x = self.layers[number](x)
        return x


def of_rows(name: str) -> SummedLoss:
    """An objective whose loss reads `name` of batches that have `x`."""
    return SummedLoss(lambda model, batch: model(batch[name]).sum(), example={"x": torch.zeros(16)})


@pytest.mark.parametrize(
    ("make", "goal"),
    [
        (lambda: build("t5"), objective("t5")),
        (lambda: Collecting(only_counts=False), of_rows("x")),
        (lambda: Collecting(only_counts=True), of_rows("x")),
        (Short, of_rows("x")),
    ],
    ids=["two stacks", "collects its layers", "counts its layers", "fails with fewer layers"],
)
def test_what_cannot_be_spliced_is_traced_whole(
    make: Callable[[], nn.Module], goal: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        model = make()
    spliced, whole = both(model, goal, monkeypatch)
    assert spliced is None
    assert whole.has_all_gradients


def test_a_model_that_fails_by_itself_has_no_trace() -> None:
    with pytest.raises(NotAffineError, match="cannot be traced"):
        traced(Short(), of_rows("y"))


def test_a_cpu_is_slowed_by_what_is_computed_a_gpu_by_bytes_alone() -> None:
    class Repeated(nn.Module):
        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64, dtype=torch.bfloat16, device="meta"))
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            for _ in range(8):
                x = self.function(x)
            return x

    def slowed(function: Callable[[Tensor], Tensor]) -> float:
        example = {"x": torch.ones(64, 64, dtype=torch.bfloat16)}
        objective = SummedLoss(lambda model, batch: model(batch["x"]).sum(), example=example)
        cpu, gpu = (
            traced(Repeated(function), objective, seq_len=64, zero_stage=0, kind=kind).work.traffic.per_sample
            for kind in ("cpu", "cuda")
        )
        return cpu / gpu

    assert slowed(torch.neg) < 0.5 < slowed(nn.functional.gelu) < 1 < slowed(lambda x: x.softmax(-1))


@pytest.mark.parametrize(
    ("family", "capability", "kernels"),
    [
        ("llama", (7, 5), ("math",)),  # memory-efficient attention has no bf16 there
        ("llama", (8, 0), ("flash",)),
        ("llama", (9, 0), ("cuDNN",)),
        ("gpt2", (9, 0), ("flash",)),  # cuDNN drops out sixteenths, and this model a tenth
        ("bert", (8, 9), ("memory-efficient",)),  # a mask
        ("t5", (8, 0), ("memory-efficient",)),  # a bias
        ("gpt_oss", (8, 0), ("grouped_mm",)),  # computes attention itself
        ("qwen3_moe", (9, 0), ("cuDNN", "grouped_mm")),
        ("looped qwen3_moe", (9, 0), ("cuDNN",)),
        ("packed llama", (8, 0), ("varlen",)),
        ("packed llama", (7, 5), ("math",)),
    ],
)
def test_a_trace_tells_which_kernels_of_attention_and_experts_ran(
    family: str, capability: tuple[int, int], kernels: tuple[str, ...]
) -> None:
    *how, kind = family.split()
    model = build(kind)
    if how == ["looped"]:
        model.set_experts_implementation("eager")
    goal = CausalLM(packed=True) if how == ["packed"] else objective(kind)
    stream = traced(model, goal, capability=capability).stream
    assert kernels_in(stream) == kernels


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_in_a_loop_run_and_take_no_less_than_in_groups(family: str) -> None:
    """transformers' loop skips the number that stands for tokens without an expert; each expert is counted as if it
    got all tokens, and the note says so."""
    grouped, looped = build(family), build(family)
    looped.set_experts_implementation("eager")
    of_groups, of_loop = (traced(each, CausalLM()) for each in (grouped, looped))
    finished = [mark.number for phase in of_loop.marks for mark in phase if mark.kind == MarkKind.GRADIENT]
    assert len(finished) == len(list(looped.parameters()))
    assert not of_groups.notes and "selected everything" in of_loop.notes[0]
    assert of_groups.stream.peak_bytes(2) < of_loop.stream.peak_bytes(2)
