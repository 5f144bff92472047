"""The rows of `bench/results/predictions.json` as other estimators can be asked for them: sizes, samples, precision.

The same facts that the loops are written from. A row that is no decoder of equal layers is left out.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from bench.recordings.loops import small_decoder, turing, zero3
from bench.recordings.loops.adapters import LLAMA, MLP
from bench.recordings.loops.decoder import SIZES, Sizes
from bench.recordings.predicted import ADAPTED, LONGEST, turing_name

Mode = Literal["step", "forward", "graph"]
"""A training step; a forward without gradients; a forward with what backward would need, and no backward."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A decoder and what it does.

    Attributes:
        width, hidden, layers, heads, vocabulary: its sizes.
        kv_heads: of keys and values.
        tied: whether embedding and head share their weight.
        samples, length: of a batch.
        precision: of weights and states, or fp32 under `torch.autocast`.
        has_flash_attention: whether a kernel keeps the scores out of memory.
        trained_elements: those that are trained; None: all.
        rank, targets: of LoRA; 0: there is none.
        has_gates: whether feed-forwards are gated; if not, positions are learned.
        is_checkpointed: whether each layer's activations are recomputed.
        zero_gpus: that share it under ZeRO-3, in mixed precision; 0: there is one, and no ZeRO.
        has_bf16_states: whether master weights and states are in bf16 as well.
    """

    name: str
    width: int
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    kv_heads: int
    tied: bool
    samples: int
    length: int
    mode: Mode
    precision: Literal["fp32", "autocast", "bf16", "fp16"]
    card: str
    has_flash_attention: bool = False
    trained_elements: int | None = None
    rank: int = 0
    targets: tuple[str, ...] = ()
    has_gates: bool = True
    is_checkpointed: bool = False
    zero_gpus: int = 0
    has_bf16_states: bool = False


SMALL = Sizes(small_decoder.WIDTH, small_decoder.HIDDEN, small_decoder.LAYERS, small_decoder.HEADS)
PATTERNS: tuple[tuple[str, Sizes, int, Mode], ...] = (
    (r"a10-transformer-large-ctx(\d+)-forward", SIZES["large"], 1, "forward"),
    (r"a10-transformer-large-ctx(\d+)-forward-with-gradients", SIZES["large"], 1, "graph"),
    (r"rtx-pro-6000-transformer-xl-ctx(\d+)-forward", SIZES["2.7b"], 4, "forward"),
    (r"rtx-pro-6000-transformer-xl-ctx(\d+)-step", SIZES["2.7b"], 4, "step"),
    (r"transformer-2\.7b-ctx(\d+)-forward", SIZES["2.7b"], 4, "forward"),
    (r"transformer-2\.7b-ctx(\d+)-step", SIZES["2.7b"], 4, "step"),
    (r"transformer-medium-ctx(\d+)-inference", SIZES["medium"], 4, "forward"),
    (r"transformer-medium-ctx(\d+)-training", SIZES["medium"], 4, "step"),
    (r"transformer-ctx(\d+)-forward", SIZES["small"], 4, "graph"),
    (r"b200-transformer-xl-ctx(\d+)-forward", SIZES["2.7b"], 4, "forward"),
    (r"h100-transformer-2\.7b-ctx(\d+)-forward", SIZES["2.7b"], 4, "graph"),
    (r"h100-transformer-2\.7b-ctx(\d+)-step", SIZES["2.7b"], 4, "step"),
    (r"transformer-4-layers-ctx(\d+)-forward", SMALL, 10, "graph"),
    (r"transformer-4-layers-ctx(\d+)-step", SMALL, 10, "step"),
)

LLAMA_SIZES = Sizes(
    LLAMA["hidden_size"],
    LLAMA["intermediate_size"],
    LLAMA["num_hidden_layers"],
    LLAMA["num_attention_heads"],
    LLAMA["vocab_size"],
)
Q_AND_V = 3072 + 3072 + 3072 + 1024  # inputs and outputs of both projections
UP_GATE_DOWN = 3 * (3072 + 8192)
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora-rank64": {"rank": 64, "targets": ("q_proj", "v_proj"), "trained_elements": 28 * 64 * Q_AND_V},
    "lora-rank10-target-mlp": {"rank": 10, "targets": tuple(MLP), "trained_elements": 28 * 10 * UP_GATE_DOWN},
    "lora-rank32-dora": {"trained_elements": 28 * (32 * Q_AND_V + 3072 + 1024)},
    "ln_tuning": {"trained_elements": (2 * 28 + 1) * 3072},
    "ia3": {"trained_elements": 28 * (1024 + 1024 + 8192)},
    "full-finetuning": {},
}


def questions(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what is asked for each row, by name; rows that no question fits are missing."""
    asked = {row["name"]: _question(row["name"], row["card"], f"{row['known']} {row['assumed']}") for row in rows}
    return {name: asdict(question) for name, question in asked.items() if question is not None}


def _question(name: str, card: str, facts: str) -> Question | None:
    if (method := name.removeprefix("l40s-llama-3.2-3b-")) in ADAPTERS:
        question = _of(name, LLAMA_SIZES, 4, LONGEST, "step", card)
        return replace(
            question, kv_heads=LLAMA["num_key_value_heads"], tied=True, precision="bf16", has_flash_attention=True,
            **ADAPTERS[method],
        )  # fmt: skip
    if name.startswith("h100-zero3"):
        sizes = Sizes(zero3.WIDTH, 4 * zero3.WIDTH, zero3.LAYERS, zero3.HEADS, zero3.VOCABULARY)
        return replace(
            _of(name, sizes, 1, zero3.LENGTH, "step", card), precision="bf16", has_gates=False, is_checkpointed=True,
            has_flash_attention=True, zero_gpus=4, has_bf16_states=name.endswith("bf16-states"),
        )  # fmt: skip
    if name.startswith("t4-"):
        return _on_turing(name, card)
    is_autocast = name.endswith("-autocast") or "that it ran under autocast" in facts
    for pattern, sizes, samples, mode in PATTERNS:
        if found := re.fullmatch(pattern, name.removesuffix("-autocast")):
            question = _of(name, sizes, samples, int(found[1]), mode, card)
            if name.startswith("b200") and question.length == 512:
                question = replace(question, mode="graph")
            return replace(question, precision="autocast" if is_autocast else "fp32")
    return None


def _on_turing(name: str, card: str) -> Question | None:
    """Return the question for a step of LoRA; the small models of the other table are no such decoders."""
    row = next((row for row in ADAPTED if turing_name(row) == name), None)
    if row is None:
        return None
    model, attention, samples, length = row
    config = turing.DECODERS[model]()
    width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    sizes = Sizes(width, config.intermediate_size, config.num_hidden_layers, heads, config.vocab_size)
    adapted = sizes.layers * 32 * (2 * 2 * width + 2 * (width + width // heads * kv_heads))
    return replace(
        _of(name, sizes, samples, length, "step", card), kv_heads=kv_heads, tied=config.tie_word_embeddings,
        precision="fp16", has_flash_attention=attention == "sdpa", is_checkpointed=True, trained_elements=adapted,
        rank=32, targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    )  # fmt: skip


def _of(name: str, sizes: Sizes, samples: int, length: int, mode: Mode, card: str) -> Question:
    return Question(
        name=name, width=sizes.width, hidden=sizes.hidden, layers=sizes.layers, heads=sizes.heads,
        vocabulary=sizes.vocabulary, kv_heads=sizes.heads, tied=False, samples=samples, length=length, mode=mode,
        precision="fp32", card=card,
    )  # fmt: skip
