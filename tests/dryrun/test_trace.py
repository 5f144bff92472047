"""A trace of a few layers, spliced, is the trace of all layers."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from frugal.config.request import Request
from frugal.dryrun.messages import AskTrace
from frugal.dryrun.trace import trace as tracing
from frugal.dryrun.trace.trace import repetition, trace
from frugal.models.objectives import CausalLM, MaskedLM, Objective, Seq2Seq, SummedLoss
from frugal.planning.memory.timeline import ModelTrace, NotAffineError

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


def refuse(*_: Any) -> Any:
    raise NotAffineError("refused")


def both(
    model: nn.Module,
    goal: Objective,
    monkeypatch: pytest.MonkeyPatch,
    *,
    mode: str = "off",
    loss: str = "plain",
    stage: int = 2,
    seq_len: int = SEQ_LEN,
    mlp: str = "plain",
) -> tuple[ModelTrace | None, ModelTrace]:
    """The spliced trace, if there is one, and that of the whole model."""
    traces = []
    for dropped in (
        lambda patch: patch.setattr(tracing, "_whole", refuse),
        lambda patch: patch.setattr(tracing, "_spliced", lambda *_: None),
    ):
        with monkeypatch.context() as patch:
            dropped(patch)
            try:
                made = trace(
                    model,
                    goal,
                    AskTrace(
                        request=Request(seq_len=seq_len),
                        kind="cuda",
                        activation_checkpointing=mode,
                        loss=loss,
                        zero_stage=stage,
                        mlp=mlp,
                    ),
                )
            except NotAffineError:
                made = None
            traces.append(made)
    assert traces[1] is not None
    return traces[0], traces[1]


CASES = [
    ("llama", {}, "off", "plain", 2),
    ("llama", {"tie_word_embeddings": True}, "full", "tiled", 3),
    ("gpt2", {}, "off", "tiled", 3),
    ("bert", {}, "offloaded", "plain", 2),
    ("llama", {}, "selective", "plain", 2),
    ("gpt_oss", {}, "full", "plain", 2),
    *(
        pytest.param(*each, marks=pytest.mark.exhaustive)
        for each in (
            ("gemma2", {}, "off", "tiled", 2),
            ("gpt2", {}, "full", "plain", 3),
            ("qwen3_moe", {}, "full", "plain", 2),
            ("gpt_oss", {}, "off", "plain", 2),
        )
    ),
]


@pytest.mark.parametrize(("family", "changes", "mode", "loss", "stage"), CASES)
def test_spliced_and_whole_traces_are_the_same(
    family: str, changes: dict[str, Any], mode: str, loss: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spliced, whole = both(build(family, **changes), objective(family), monkeypatch, mode=mode, loss=loss, stage=stage)
    assert spliced == whole


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_tiled_mlps_are_spliced(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spliced, whole = both(build("llama"), CausalLM(), monkeypatch, seq_len=64, mode="full", mlp="tiled", stage=stage)
    assert spliced == whole
    assert bool(whole.gathered_as_one) == (stage == 3)


def test_scratch_that_is_no_multiple_of_the_samples_keeps_no_model_from_being_spliced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spliced, whole = both(build("llama"), CausalLM(), monkeypatch, seq_len=64)
    assert spliced == whole
    assert min(whole.stream.fixed) < 0  # what sums the embedding's gradient: a row for every ten tokens, rounded down


def test_a_trace_survives_json() -> None:
    made = trace(
        build("llama"),
        CausalLM(),
        AskTrace(
            request=Request(seq_len=SEQ_LEN), kind="cuda", activation_checkpointing="off", loss="plain", zero_stage=3
        ),
    )
    assert msgspec.json.decode(msgspec.json.encode(made), type=ModelTrace) == made


def test_two_stacks_of_layers_are_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    spliced, whole = both(build("t5"), objective("t5"), monkeypatch)
    assert spliced is None
    assert whole.has_all_gradients


def test_alternating_layers_are_one_period() -> None:
    found = repetition(build("gpt_oss"))
    assert found is not None
    assert (found.first_layer, found.period, found.num_periods) == (0, 2, 7)


def test_a_first_layer_of_another_kind_is_no_part_of_a_period() -> None:
    found = repetition(build("qwen3_moe", mlp_only_layers=[0]))
    assert found is not None
    assert (found.first_layer, found.period, found.num_periods) == (1, 1, 7)


def test_layers_that_differ_in_a_setting_are_not_spliced() -> None:
    model = build("llama")
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.attention_dropout = number / 100
    assert repetition(model) is None


class Collecting(nn.Module):
    """Keeps what every layer says, or counts them, so that a tensor outside the layers grows with their number."""

    def __init__(self, only_counts: bool) -> None:
        super().__init__()
        self.only_counts = only_counts
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(samples, 16)` to the same."""
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return x * x.new_ones(len(seen), 1, 16).sum(0) if self.only_counts else torch.stack(seen).sum(0)


@pytest.mark.parametrize("only_counts", [False, True])
def test_a_model_that_collects_its_layers_is_traced_whole(only_counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = Collecting(only_counts)
    goal = SummedLoss(lambda model, batch: model(batch["x"]).sum(), example={"x": torch.zeros(16)})
    spliced, whole = both(model, goal, monkeypatch)
    assert spliced is None
    assert whole.has_all_gradients


class Short(nn.Module):
    """Counts its layers by itself, so that it fails where some are missing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(samples, 16)` to the same."""
        for number in range(8):
            x = self.layers[number](x)
        return x


def test_a_model_that_fails_with_fewer_layers_is_traced_whole() -> None:
    with torch.device("meta"):
        model = Short()
    goal = SummedLoss(lambda model, batch: model(batch["x"]).sum(), example={"x": torch.zeros(16)})
    made = trace(
        model,
        goal,
        AskTrace(
            request=Request(seq_len=SEQ_LEN), kind="cuda", activation_checkpointing="off", loss="plain", zero_stage=2
        ),
    )
    assert made.has_all_gradients


def test_a_model_that_fails_by_itself_has_no_trace() -> None:
    goal = SummedLoss(lambda model, batch: model(batch["y"]).sum(), example={"x": torch.zeros(16)})
    with pytest.raises(NotAffineError, match="cannot be traced"):
        trace(
            Short(),
            goal,
            AskTrace(
                request=Request(seq_len=SEQ_LEN),
                kind="cuda",
                activation_checkpointing="off",
                loss="plain",
                zero_stage=2,
            ),
        )


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
        asked = AskTrace(
            request=Request(seq_len=64), kind="cuda", activation_checkpointing="off", loss="plain", zero_stage=0
        )
        cpu, gpu = (
            trace(Repeated(function), objective, replace(asked, kind=kind)).work.traffic.per_sample
            for kind in ("cpu", "cuda")
        )
        return cpu / gpu

    assert slowed(torch.neg) < 0.5 < slowed(nn.functional.gelu) < 1 < slowed(lambda x: x.softmax(-1))
