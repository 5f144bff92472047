"""Sequence parallelism: several ranks share each sample, each a part of its positions, and attention by heads.

The model is split by positions everywhere but in attention, and by heads inside it.

DeepSpeed's Ulysses (Jacobs et al., 2023, arXiv:2309.14509): before attention an all-to-all turns parts of the
sequence with all heads into whole sequences with a part of the heads, and another one turns the result back. With n
ranks and 1/n of the positions each:

    query, key, value   (samples, heads, positions / n, size)  ->  (samples, heads / n, positions, size)
    result              (samples, positions, heads / n, size)  ->  (samples, positions / n, heads, size)

transformers' own attention runs between the two, through its documented interface for attention functions, with the
mask of the whole sequence. Key and value heads that n does not divide are repeated until it does.

Not DeepSpeed's `UlyssesSPAttentionHF`: see docs/decisions/sequence-parallelism.md.

All ranks of a group collate the same samples. Labels are shifted, and positions counted, before the cut, so that the
borders of parts are no different from other places, and the sums over all parts are those over the samples.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal import errors
from frugal.deepspeed_adapter import collectives
from frugal.distributed.connections.listeners import closed_afterwards
from frugal.models import packs, transformers_internals
from frugal.models.objectives import Batch, CausalLM, Objective, Sample, TextObjective, token_loss_sum
from frugal.units import IGNORED

Exchange = Callable[[Tensor, Tensor], object]
"""A function that writes an all-to-all over dimension 0 into its first argument; both are contiguous `(ranks, ...)`."""

_SPLIT = "_sequence_split"
"""The attribute of modules whose attention is split, so that it is found when a layer is recomputed, too."""


KERNEL = "sdpa"
"""transformers' name of the attention that can be split."""

HINT = "leave --sequence-parallel out"

_ROPE_OF_LENGTH = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies depend on the longest position of a forward, which differs from part to part."""


class Split:
    """The attention of one model, split over `size` ranks, which `exchange` with each other.

    `num_calls`: how often attention has run under it.
    """

    def __init__(self, size: int, exchange: Exchange) -> None:
        self.size = size
        self.num_calls = 0
        self._exchange = exchange

    def to_heads(self, states: Tensor) -> Tensor:
        """Turn `(samples, heads, part, size)` into `(samples, heads / n, positions, size)`."""
        sent = states.unflatten(1, (self.size, -1)).permute(1, 3, 0, 2, 4)  # positions first: joining them is no copy
        return self.exchanged(sent.contiguous()).flatten(0, 1).permute(1, 2, 0, 3)

    def to_parts(self, attended: Tensor) -> Tensor:
        """Turn `(samples, positions, heads / n, size)` into `(samples, part, heads, size)`."""
        sent = attended.unflatten(1, (self.size, -1)).transpose(0, 1)
        return self.exchanged(sent.contiguous()).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def exchanged(self, tensor: Tensor) -> Tensor:
        """Return what the ranks have for this one: `(ranks, ...)`, as `tensor`, in which it has something for each."""
        received: Tensor = _AllToAll.apply(tensor, self._exchange)
        return received


class SplitInOneProcess(Split):
    """All parts in one process, as rows of a batch: row `part * samples + sample`. For trials, without ranks."""

    def __init__(self, size: int) -> None:
        super().__init__(size, lambda *_: None)

    def to_heads(self, states: Tensor) -> Tensor:
        """Exchange as if each block of rows were a rank's."""
        by_rank = states.unflatten(1, (self.size, -1)).unflatten(0, (self.size, -1))
        return by_rank.permute(2, 1, 3, 0, 4, 5).flatten(3, 4).flatten(0, 1)

    def to_parts(self, attended: Tensor) -> Tensor:
        """Exchange as if each block of rows were a rank's."""
        by_group = attended.unflatten(1, (self.size, -1)).unflatten(0, (self.size, -1))
        return by_group.permute(2, 1, 3, 0, 4, 5).flatten(3, 4).flatten(0, 1)


class _AllToAll(torch.autograd.Function):
    """An all-to-all over dimension 0, and in backward the same of the gradient, which goes the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        received = torch.empty_like(tensor)
        exchange(received, tensor)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        returned = torch.empty_like(gradient)
        ctx.exchange(returned, gradient)
        return returned, None


def apply(model: nn.Module, split: Split) -> None:
    """Split the attention of all modules of `model`; other models keep theirs."""
    transformers_internals.attention_by(KERNEL, _attention)
    for module in model.modules():
        vars(module)[_SPLIT] = split


def split_over_ranks(model: nn.Module, size: int) -> None:
    """Split the attention of `model` over each `size` consecutive ranks; 1: it stays whole. Collective.

    Raises:
        RequestError: the model cannot be split so.
    """
    if size > 1:
        refuse(model, size)
        with closed_afterwards():
            exchange = collectives.exchange_within(size)
        apply(model, Split(size, exchange))


def _attention(
    plain: Callable[..., tuple[Tensor, Any]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Run `plain`, transformers' own attention, on whole sequences where those of `module` are split."""
    split: Split | None = vars(module).get(_SPLIT)
    if split is None:
        return plain(module, query, key, value, attention_mask, **options)
    split.num_calls += 1
    times = repetitions(query.shape[1], key.shape[1], split.size)
    if times > 1:
        key, value = (states.repeat_interleave(times, dim=1) for states in (key, value))
    query, key, value = map(split.to_heads, (query, key, value))
    per_group = query.shape[1] // key.shape[1]  # of which modules may keep another number
    is_other = vars(module).get("num_key_value_groups", per_group) != per_group
    with patch.object(module, "num_key_value_groups", per_group) if is_other else nullcontext():
        attended, weights = plain(module, query, key, value, attention_mask, **options)
    return split.to_parts(attended), weights


def repetitions(num_heads: int, num_key_value_heads: int, size: int) -> int:
    """Return how often key and value heads repeat so that `size` ranks, which divide `num_heads`, have as many."""
    per_group = num_heads // num_key_value_heads
    divisors = (times for times in range(1, per_group + 1) if per_group % times == 0)
    return next(times for times in divisors if num_key_value_heads * times % size == 0)


def refuse(model: nn.Module, size: int) -> None:
    """Refuse a model whose attention cannot be split over `size` ranks.

    Raises:
        RequestError: with the reason.
    """
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else None
    kernel, heads = getattr(text, "_attn_implementation", None), getattr(text, "num_attention_heads", None)
    has_two_parts = getattr(config, "is_encoder_decoder", False)
    given = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    ropes = [each for each in given if isinstance(each, dict)]
    ropes += [each for rope in ropes for each in rope.values() if isinstance(each, dict)]  # one for each kind of layer
    kinds = _ROPE_OF_LENGTH.intersection(rope.get("rope_type", rope.get("type")) for rope in ropes)
    reasons = {
        "it is no model of transformers, whose attention functions alone can be replaced": text is None,
        "it has an encoder and a decoder, which have sequences of their own": has_two_parts,
        f"its attention is {kernel!r}, and only {KERNEL!r} is known to be split right": kernel != KERNEL,
        f"its rotary embedding ({min(kinds, default='')}) depends on the length of what it reads, and a part is "
        "shorter": kinds,
        f"its {heads} attention heads do not divide by {size}": not isinstance(heads, int) or heads % size,
    }
    refuse_for(type(model).__name__, size, reasons)


def refuse_for(name: str, size: int, reasons: Mapping[str, object]) -> None:
    """Refuse that `size` ranks share samples of the model `name`, for the first of `reasons` that holds.

    Raises:
        RequestError: with that reason.
    """
    what = f"--sequence-parallel {size} is impossible for {name}"
    errors.refuse(*((holds, what, reason, HINT) for reason, holds in reasons.items()))


# What a rank reads, and what it adds to the loss


def parts_of(objective: Objective, size: int, rank: int) -> Objective:
    """Return `objective` for `rank`, one of each `size` consecutive ones that share samples; itself for `size` 1.

    Raises:
        RequestError: it is none whose samples can be split.
    """
    if size == 1:
        return objective
    if type(objective) is CausalLM and not objective.own_loss:
        return SequenceParts(objective, size, rank % size)
    raise errors.RequestError(
        "--sequence-parallel cannot split the samples of this objective",
        because="its loss is the model's own, of whole sequences"
        if isinstance(objective, CausalLM)
        else f"it is known for the next token (causal-lm) alone, and this is {type(objective).__name__}",
        hint=HINT,
    )


class SequenceParts(TextObjective):
    """Part `part` of `size` of what `CausalLM` trains. `labels` of its batches are the targets of each position.

    Samples are padded to a multiple of `size`; what is added has no target, and is behind all that could see it.
    """

    def __init__(self, whole: CausalLM, size: int, part: int) -> None:
        self.whole = whole
        self.size = size
        self.part = part

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return the part's `input_ids`, `labels`, `position_ids`; packed `whole_position_ids (samples, positions)`."""
        batch = self.whole.collate(samples)
        num_samples, length = batch["input_ids"].shape
        more = -length % self.size
        targets = F.pad(batch["labels"][:, 1:], (0, 1 + more), value=IGNORED)
        positions = batch.get("position_ids", torch.arange(length).expand(num_samples, -1))
        positions = F.pad(positions, (0, more))
        tokens = F.pad(batch["input_ids"], (0, more), value=self.whole.pad_id)
        cut = {
            name: tensor.chunk(self.size, dim=1)[self.part].clone(memory_format=torch.contiguous_format)
            for name, tensor in (("input_ids", tokens), ("labels", targets), ("position_ids", positions))
        }
        return cut | {"whole_position_ids": positions} if self.whole.packed else cut

    def plain_sample(self, length: int, *, is_target: bool) -> Sample:
        """Return a sample of the whole objective."""
        return self.whole.plain_sample(length, is_target=is_target)

    def num_tokens(self, samples: Sequence[Sample], batch: Batch) -> int:
        """Count the tokens of `samples` that are in this part of them, which `batch` is."""
        length = batch["input_ids"].shape[1]
        return sum(min(max(len(sample["input_ids"]) - self.part * length, 0), length) for sample in samples)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed cross entropy of this part's positions; masks are those of the whole sequence."""
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        whole = batch.get("whole_position_ids")
        documents = None if whole is None else packs.numbers_of_documents(whole)
        with transformers_internals.masks_of_whole_sequences(self.size, whole, documents):
            return token_loss_sum(model, inputs, batch["labels"])
