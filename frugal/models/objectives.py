"""Losses as sums over targets, so that any cut of a global batch adds up to the same mean.

An `Objective` turns samples into tensors, counts their targets and sums the loss over them. The engine divides the
sum by the targets of the *global* batch, which it knows before the first forward. `SummedLoss` makes one of any loss
function; the others are those of transformers' text models: next and masked tokens, pairs of texts, classes.
"""

import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal.config.sample_lengths import DOCUMENT_TOKENS
from frugal.errors import RequestError, failure, refuse
from frugal.models import packs, tiled_loss
from frugal.models.losses import own_loss, predictions
from frugal.units import IGNORED

Sample = Mapping[str, Any]
Batch = dict[str, Tensor]


class Objective(Protocol):
    """A loss to train. Every micro-batch must build the same autograd graph: ZeRO-2 reduces by order of arrival."""

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return tensors of shape `(len(samples), ...)`, on the CPU."""

    def dummy(self) -> Sample:
        """Return the smallest sample, without a target: what a rank runs where its micro-batch is empty."""

    def example(self, num_samples: int, seq_len: int) -> Batch:
        """Return the largest batch of `num_samples`: every sample `seq_len` tokens long. Its values do not matter."""

    def count(self, batch: Batch) -> int:
        """Count the targets in the batch: what the loss is averaged over."""

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss summed over targets, fp32, shape `()`; exactly 0 with zero gradients without a target."""


class SummedLoss:
    """Any module with a loss of your own.

    `loss(model, batch)` returns the loss *summed* over the targets of the batch, shape `()`. `example` is one
    sample of the largest size, or a function from `seq_len` to one; it also serves as the dummy, its loss times
    zero, so it must be finite. Where a factory makes it on meta, it is zeros. `collate` makes a dict of tensors from
    samples (default: torch's, of values cast to the types of the example's). `count` counts a batch's targets (default:
    its samples).
    """

    def __init__(
        self,
        loss: Callable[[nn.Module, Batch], Tensor],
        *,
        example: Sample | Callable[[int], Sample],
        collate: Callable[[list[Any]], Batch] = torch.utils.data.default_collate,
        count: Callable[[Batch], int] | None = None,
    ) -> None:
        refuse(
            (
                not (callable(example) or isinstance(example, Mapping)),
                f"the example of a sample is of type {type(example).__name__}",
                "its values need names, those of forward's parameters",
                'give a dict: example={"x": torch.zeros(SHAPE), "y": 0}; samples may be tuples in its order',
            )
        )
        self._loss = loss
        self._example = example
        self._collate = collate
        self.collates = collate is not torch.utils.data.default_collate  # in a way of its own
        self._count = count

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return what `collate` makes of them, and `real`: 1, or 0 for the dummy, shape `()`.

        Samples may be tuples of the example's values. torch's way takes those alone, whatever else a sample has.
        """
        real = not isinstance(samples[0], _Dummy)
        named = [each if isinstance(each, Mapping) else dict(zip(self.names, each, strict=False)) for each in samples]
        plain = [{name: value for name, value in sample.items() if name != "draw"} for sample in named]
        if not self.collates:
            plain = list(map(self._like_example, plain))
        with failure(
            "samples cannot be put into one batch",
            hint="pad them in a function: frugal.MeanLoss(example=..., collate=...)",
        ):
            return {**self._batch(plain), "real": torch.tensor(float(real))}

    def dummy(self) -> Sample:
        """Return the example, marked."""
        return _Dummy(self.sample(2))

    def example(self, num_samples: int, seq_len: int) -> Batch:
        """Return `num_samples` copies of the example."""
        return self.collate([self.sample(seq_len)] * num_samples)

    def count(self, batch: Batch) -> int:
        """Count the targets; none in the dummy."""
        return int(self._targets(self._without_mark(batch))) if batch["real"] else 0

    def _targets(self, batch: Batch) -> Any:
        return len(next(iter(batch.values()))) if self._count is None else self._count(batch)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss in fp32, times zero for the dummy."""
        return self._loss(model, self._without_mark(batch)).float() * batch["real"]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of a sample's values, in the order of the example."""
        return tuple(self.sample(2))

    @functools.cached_property
    def _values(self) -> Batch:
        return self._batch([self.sample(2)])

    def _batch(self, samples: list[Any]) -> Batch:
        """Return what `collate` makes of samples. Raises: RequestError: that is no dict of tensors."""
        batch = self._collate(samples)
        named: Any = batch if isinstance(batch, Mapping) else {"the whole": batch}
        others = [f"{name} is a {type(each).__name__}" for name, each in named.items() if not isinstance(each, Tensor)]
        refuse(
            (
                others or named is not batch,
                "a batch is no dict of tensors",
                f"of what samples are collated to, {', '.join(others) or 'the whole is a tensor'}",
                "give each tensor a name of its own: in the example and samples, or in the dict that `collate` makes",
            )
        )
        return batch

    def _like_example(self, sample: Sample) -> dict[str, Any]:
        """Return the values that the example has, of its types.

        Raises:
            RequestError: one is missing, or of another kind.
        """
        if name := next((name for name in self._values if name not in sample), None):
            raise RequestError(
                f"a sample has no `{name}`",
                because=f"it has {', '.join(sample)}, and the example {', '.join(self._values)}",
                hint="give both the same names",
            )
        values = {name: sample[name] for name in self._values}
        for name, shown in self._values.items():
            if isinstance(shown, Tensor):
                with failure(f"`{name}` of a sample is no tensor", hint="give numbers, as the example has them"):
                    value = torch.as_tensor(sample[name])
                is_cut = value.is_floating_point() and not shown.is_floating_point()
                if is_cut or value.dim() != shown.dim() - 1:
                    raise RequestError(
                        f"`{name}` of a sample is {value.dtype} of shape {tuple(value.shape)}",
                        because=f"that of the example is {shown.dtype} of shape {tuple(shown.shape[1:])}",
                        hint="give the example the type and the dimensions of the samples",
                    )
                values[name] = value.to(shown.dtype)
        return values

    def sample(self, seq_len: int) -> Sample:
        """Return the example, on the CPU."""
        sample = self._example(seq_len) if callable(self._example) else self._example
        return {  # factories run with meta as default device, and samples need values
            name: torch.zeros_like(value, device="cpu") if isinstance(value, Tensor) and value.is_meta else value
            for name, value in sample.items()
        }

    @staticmethod
    def _without_mark(batch: Batch) -> Batch:
        return {name: tensor for name, tensor in batch.items() if name != "real"}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss in what forward returns for `batch`, shape `()`: the value named `loss`, or the first number.

    Forward gets the values that it has parameters for, by their names; where its only parameter is none of them, the
    batch as it is. Floating-point values are cast to the type of the weights.

    Raises:
        RequestError: forward takes other names, or returns no number with a gradient, or several.
    """
    inner: Any = getattr(model, "module", model) if hasattr(model, "set_gradient_accumulation_boundary") else model
    parameters = inspect.signature(inner.forward).parameters
    dtype = next((each.dtype for each in inner.parameters() if each.is_floating_point()), torch.float32)
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    kinds, lacking = {each.kind for each in parameters.values()}, [n for n in required(inner.forward) if n not in batch]
    takes_it_whole = len(lacking) == 1 == len(parameters)
    if lacking and not takes_it_whole:
        raise RequestError(
            f"{type(inner).__name__}.forward takes `{', '.join(lacking)}`, which samples do not have",
            because=f"it is called with the values of a sample by their names, {', '.join(batch)}",
            hint=f"name them as forward does: {example_in_words(inner)}",
        )
    if takes_it_whole or inspect.Parameter.VAR_POSITIONAL in kinds:
        return _loss_in(inner, model(batch) if takes_it_whole else model(*batch.values()))
    taken = batch if inspect.Parameter.VAR_KEYWORD in kinds else {n: batch[n] for n in batch if n in parameters}
    return _loss_in(inner, model(**taken))


def required(function: Callable[..., Any]) -> list[str]:
    """Return the names of what a function takes and has no default for."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.default is each.empty and each.kind.name[:4] != "VAR_"]


def example_in_words(module: nn.Module) -> str:
    """Return Python of an example of a sample, with the names that forward takes."""
    named = [f'"{each.name}": torch.zeros(SHAPE)' for each in inspect.signature(module.forward).parameters.values()]
    return "{" + ", ".join(named) + "}"


def _loss_in(module: nn.Module, returned: Any) -> Tensor:
    """Return the loss in what a module's forward returned. Raises as `loss_of`."""
    named = returned if isinstance(returned, Mapping) else getattr(returned, "__dict__", {})
    loss = named.get("loss", getattr(returned, "loss", None))
    several = list(returned if isinstance(returned, tuple | list) else named.values() or [returned])
    values = several
    if isinstance(loss, Tensor):
        values = [loss]
    elif isinstance(returned, Tensor):
        values = [returned]
    numbers = [each for each in values if isinstance(each, Tensor) and not each.dim() and each.is_floating_point()]
    trained = [each for each in numbers if each.requires_grad]
    if numbers and (not torch.is_grad_enabled() or (len(trained) == 1 and trained[0] is numbers[0])):
        return numbers[0]
    shown = [f"a tensor {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__ for each in values]
    raise RequestError(
        f"{type(module).__name__}.forward returns {'several losses' if len(trained) > 1 else 'no loss to train by'}",
        because=f"it returns {', '.join(shown)}; a loss is a number with a gradient: named `loss`, or the first number",
        hint="return it as a tensor, without .item() and .detach()"
        if not trained and (numbers or any(isinstance(each, float) for each in values))
        else "return {'loss': loss.mean()} from forward (of several, their sum), or give "
        "frugal.SummedLoss(loss, example=...)",
    )


TARGETS = ("labels", "label", "targets", "target", "y")
"""Names of what forward is to predict."""


class MeanLoss(SummedLoss):
    """Any module whose forward returns the *mean* loss over its targets: a number, or a tuple, dict or object with it.

    `loss(model, batch)` may compute it instead. `count` counts the targets. Default: the entries of `labels` (or
    `label`, `targets`, `target`, `y`) that are not -100, where the example has whole numbers by that name; otherwise
    samples. The mean times the targets is a sum, which adds up over micro-batches. The rest is as in `SummedLoss`.
    """

    def __init__(self, loss: Callable[[nn.Module, Batch], Tensor] = loss_of, **how: Any) -> None:
        super().__init__(loss, **how)

    @property
    def counted(self) -> str:
        """The targets, in words."""
        labels = "samples" if self._labels is None else f"the entries of `{self._labels}` that are not {IGNORED}"
        return labels if self._count is None else "what its count says"

    @property
    def summed(self) -> SummedLoss:
        """The same loss, taken as a sum."""
        return SummedLoss(self._loss, example=self._example, collate=self._collate)

    def recounted(self, left_out: Iterable[int], names: Iterable[str]) -> dict[str, "MeanLoss"]:
        """Return the same loss with other counts of its targets, by their code.

        `left_out`: values of labels that are no targets; `names`: of values of which 0 may be none, as in a mask.
        """
        labels = self._labels
        pairs = [
            *((labels, each) for each in left_out if labels),
            *((name, 0) for name in names),
            *((name, each) for name in names for each in left_out),
        ]
        counts: dict[str, Callable[[Batch], Any]] = {
            f'(batch["{name}"]{"[:, 1:]" * begin} != {value}).sum()': functools.partial(_others, name, value, begin)
            for name, value in pairs
            if name in self._values
            for begin in range(min(self._values[name].dim(), 2))
        }
        alone = {f'len(batch["{labels}"])': lambda batch: len(batch[labels])} if labels else {}
        how = {"example": self._example, "collate": self._collate}
        return {words: MeanLoss(self._loss, count=count, **how) for words, count in (alone | counts).items()}

    @functools.cached_property
    def _labels(self) -> str | None:
        whole = {name for name, value in self._values.items() if not value.is_floating_point()}
        return next((name for name in TARGETS if name in whole), None)

    def _targets(self, batch: Batch) -> Any:
        return (
            super()._targets(batch)
            if self._labels is None or self._count is not None
            else (batch[self._labels] != IGNORED).sum()
        )

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss times the targets, fp32; 0 without a target."""
        own = self._without_mark(batch)
        targets = torch.as_tensor(self._targets(own), device=batch["real"].device)
        refilled = {n: each.masked_fill(targets == 0, 0) for n, each in own.items() if n == self._labels}  # or NaN
        return self._loss(model, own | refilled).float() * targets * batch["real"]


def _others(name: str, value: int, begin: int, batch: Batch) -> Tensor:
    """Count what is not `value` in `batch[name]`, of each sample from position `begin` on."""
    return ((batch[name][:, begin:] if begin else batch[name]) != value).sum()


class _Dummy(dict[str, Any]):
    """A sample that counts nothing."""


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy in fp32 of `logits (..., classes)`, summed where `targets` is not `IGNORED`."""
    predictions.show(logits, targets)
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


def token_loss_sum(model: nn.Module, inputs: Batch, targets: Tensor) -> Tensor:
    """Return the cross entropy of `model(**inputs)`, summed over `targets (samples, positions)`.

    Tiled where the plan says so, so that the logits of a batch never exist at once.
    """
    if tiled_loss.is_applied(model):
        loss: Tensor = tiled_loss.outputs_with_sum(model, inputs, targets).logits
        return loss
    return summed_cross_entropy(model(**inputs).logits, targets)


def tokens_and_positions(objective: Objective, samples: Sequence[Sample], batch: Batch) -> tuple[int, int]:
    """Count the tokens of `samples` and the positions of `batch`, collated of them; of pairs on both sides.

    `samples`: none in a dummy. (0, 0) for an objective that does not say `pads_tokens`: nobody knows what it pads.
    """
    if not getattr(objective, "pads_tokens", False):
        return 0, 0
    sides = ("input_ids", "labels") if "decoder_input_ids" in batch else ("input_ids",)
    positions = sum(batch[side].numel() for side in sides)
    if (of_part := getattr(objective, "num_tokens", None)) is not None:  # ranks share samples, and each counts its part
        return of_part(samples, batch), positions
    return sum(len(sample[side]) for sample in samples for side in sides), positions


def pad(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Pad `rows` of token ids on the right with `fill`: shape `(len(rows), longest)`, int64."""
    padded = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return torch.from_numpy(padded)


def real_tokens(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the attention mask of `rows` padded on the right: 1 for a token, `(len(rows), longest)`, int64.

    Passed also where nothing is padded, so that every batch takes the same way through the model.
    """
    lengths = torch.tensor([len(row) for row in rows])
    return (torch.arange(int(lengths.max())) < lengths[:, None]).long()


class TextObjective(Objective):
    """A base of the objectives of texts: a batch has `labels`, of which `IGNORED` is no target."""

    pads_tokens = True  # each sample's, to the longest in its micro-batch

    def plain_sample(self, length: int, *, is_target: bool) -> Sample:
        """Return a sample of `length` tokens (of pairs on both sides), all of them targets or none."""
        raise NotImplementedError  # each objective has its own

    def dummy(self) -> Sample:
        """Return two tokens without a target."""
        return self.plain_sample(2, is_target=False)

    def example(self, num_samples: int, seq_len: int) -> Batch:
        """Return `num_samples` rows of `seq_len` tokens; how many are targets makes no difference to memory."""
        return self.collate([self.plain_sample(seq_len, is_target=True)] * num_samples)

    def count(self, batch: Batch) -> int:
        """Count the targets in `labels`."""
        return int((batch["labels"] != IGNORED).sum())


class CausalLM(TextObjective):
    """Next-token prediction. A sample has `input_ids` and, if some positions are no targets, `labels`.

    `packed`: it also has `documents`, the tokens of each document in it. They do not see each other, and none begins
    with a target. Without `documents` it is one. `own_loss`: the model's own is trained, with what it adds to the
    cross entropy; see `frugal.models.losses.own_loss`. `document_tokens`: the mean of a pack's documents, at least; see
    `frugal.models.packs`.
    """

    def __init__(
        self, pad_id: int = 0, *, packed: bool = False, own_loss: bool = False, document_tokens: int = DOCUMENT_TOKENS
    ) -> None:
        self.pad_id = pad_id
        self.document_tokens = document_tokens
        self.packed = packed
        self.own_loss = own_loss

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return `input_ids`, `labels`, if packed `position_ids`, for the own loss `real`: each `(samples, longest)`;
        packed also `packs.by_document`.

        `real` is 1 where a token is no padding; routers need it. There is no attention mask: padding is on the right,
        and causal attention never looks there. That keeps the flash kernel, which takes no mask. Packed, the model
        makes one from the positions.
        """
        batch = {
            "input_ids": pad([sample["input_ids"] for sample in samples], self.pad_id),
            "labels": pad([sample.get("labels", sample["input_ids"]) for sample in samples], IGNORED),
        }
        if self.own_loss:
            batch["real"] = real_tokens([sample["input_ids"] for sample in samples])
        if not self.packed:
            return batch
        documents = [sample.get("documents", [len(sample["input_ids"])]) for sample in samples]
        for row, of_sample in enumerate(documents):
            batch["labels"][row, packs.starts(of_sample)] = IGNORED
        positions: list[Any] = [packs.positions(each) for each in documents]
        if self.document_tokens:
            batch |= packs.by_document(documents, batch["input_ids"].shape[1], self.document_tokens)
        return batch | {"position_ids": pad(positions, 0)}

    def plain_sample(self, length: int, *, is_target: bool) -> Sample:
        """Return padding."""
        return {"input_ids": [self.pad_id] * length, "labels": [self.pad_id if is_target else IGNORED] * length}

    def count(self, batch: Batch) -> int:
        """Count the targets; position 0 is predicted by nothing."""
        return int((batch["labels"][:, 1:] != IGNORED).sum())

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed cross entropy of every next token."""
        next_tokens = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)  # cheaper than a copy of all logits but one
        inputs: Batch = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
        documents = batch.get(packs.OFFSETS), batch.get(packs.LONGEST)
        with packs.documents_kept_apart(*documents) if self.packed else nullcontext():
            if self.own_loss:
                return own_loss.loss_sum(model, inputs, labels=batch["labels"], targets=next_tokens, real=batch["real"])
            return token_loss_sum(model, inputs, next_tokens)


class MaskedLM(TextObjective):
    """Predicting masked tokens, as BERT does (https://arxiv.org/abs/1810.04805, section 3.1).

    A sample has `input_ids`; also `labels` if it is masked already. Otherwise `share` of its tokens, at least one
    and no special ones, become targets: 80 % of them are shown as the mask, 10 % as a random token, 10 % unchanged.
    Which ones depends on `seed`, the sample's tokens and its `draw` (see `global_batches.py`: its number in the endless
    training order; absent in evaluation), and on nothing else: every epoch masks anew, every world size alike.
    """

    def __init__(
        self,
        *,
        pad_id: int,
        mask_id: int,
        vocab_size: int,
        special_ids: Sequence[int] = (),
        share: float = 0.15,
        seed: int = 0,
    ) -> None:
        self.pad_id = pad_id
        self.mask_id = mask_id
        self.special_ids = np.unique([pad_id, mask_id, *special_ids])
        self.ordinary_ids = np.setdiff1d(np.arange(vocab_size), self.special_ids)
        self.share = share
        self.seed = seed

    def mask(self, sample: Sample) -> tuple[Sequence[int], Sequence[int]]:
        """Return the masked tokens and the labels of a sample, each as long as its `input_ids`."""
        tokens = np.asarray(sample["input_ids"], dtype=np.int64)
        if "labels" in sample:
            return tokens, sample["labels"]  # type: ignore[return-value]  # an array is as good as a sequence here
        random = np.random.default_rng((self.seed, sample.get("draw", 0), zlib.crc32(tokens.tobytes())))
        candidates = np.flatnonzero(~np.isin(tokens, self.special_ids))
        num_targets = min(len(candidates), max(1, round(self.share * len(candidates))))
        chosen = random.permutation(candidates)[:num_targets]
        kind = random.random(num_targets)
        labels = np.full_like(tokens, IGNORED)
        labels[chosen] = tokens[chosen]
        shown = tokens.copy()
        shown[chosen[kind < 0.8]] = self.mask_id
        replaced = chosen[kind >= 0.9]
        if len(self.ordinary_ids):
            shown[replaced] = random.choice(self.ordinary_ids, len(replaced))
        return shown, labels  # type: ignore[return-value]  # as above

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return `input_ids`, `attention_mask` and `labels`, each of shape `(samples, longest)`."""
        masked = [self.mask(sample) for sample in samples]
        return {
            "input_ids": pad([tokens for tokens, _ in masked], self.pad_id),
            "attention_mask": real_tokens([tokens for tokens, _ in masked]),
            "labels": pad([labels for _, labels in masked], IGNORED),
        }

    def plain_sample(self, length: int, *, is_target: bool) -> Sample:
        """Return masked tokens."""
        return {"input_ids": [self.mask_id] * length, "labels": [self.mask_id if is_target else IGNORED] * length}

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed cross entropy of the masked tokens."""
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        return token_loss_sum(model, inputs, batch["labels"])


class Seq2Seq(TextObjective):
    """Predicting a target text from a source text. A sample has `input_ids` (source) and `labels` (target tokens).

    `decoder_inputs` makes what the decoder reads from labels of shape `(samples, positions)`, as the model's own loss
    does; without it, the labels follow `start_id`. `own_loss`: as in `CausalLM`.
    """

    def __init__(
        self,
        pad_id: int = 0,
        *,
        start_id: int = 0,
        decoder_inputs: Callable[[Tensor], Tensor] | None = None,
        own_loss: bool = False,
    ) -> None:
        self.pad_id = pad_id
        self.start_id = start_id
        self.own_loss = own_loss
        self._decoder_inputs = decoder_inputs or self._after_start

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return `input_ids`, `attention_mask (samples, longest source)`, and the rest `(samples, longest target)`.

        The decoder needs no mask: it never looks at padding, which is on the right.
        """
        sources = [sample["input_ids"] for sample in samples]
        labels = pad([sample["labels"] for sample in samples], IGNORED)
        return {
            "input_ids": pad(sources, self.pad_id),
            "attention_mask": real_tokens(sources),
            "decoder_input_ids": self._decoder_inputs(labels),
            "labels": labels,
        }

    def _after_start(self, labels: Tensor) -> Tensor:
        shifted = torch.full_like(labels, self.start_id)
        shifted[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, self.pad_id)
        return shifted

    def plain_sample(self, length: int, *, is_target: bool) -> Sample:
        """Return a pair of start tokens."""
        return {"input_ids": [self.start_id] * length, "labels": [self.start_id if is_target else IGNORED] * length}

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed cross entropy of the target tokens."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        if self.own_loss:
            return own_loss.loss_sum(model, inputs, labels=batch["labels"], targets=batch["labels"])
        return token_loss_sum(model, inputs, batch["labels"])


class SequenceClassification(TextObjective):
    """One class for each text. A sample has `input_ids` and `label`, an int from 0.

    A model that is not `bidirectional` gets no attention mask, as in `CausalLM`; it finds the last token, which
    decides, by its configured `pad_token_id`. Encoder-decoders find it by an end token, `end_id`, which every sample
    must have; so have the samples made here.
    """

    def __init__(self, pad_id: int = 0, *, bidirectional: bool = True, end_id: int | None = None) -> None:
        self.pad_id = pad_id
        self.bidirectional = bidirectional
        self.end_id = pad_id if end_id is None else end_id

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return `input_ids` (and `attention_mask`) of shape `(samples, longest)`, `labels` of shape `(samples,)`."""
        rows = [sample["input_ids"] for sample in samples]
        mask = {"attention_mask": real_tokens(rows)} if self.bidirectional else {}
        return {
            "input_ids": pad(rows, self.pad_id),
            **mask,
            "labels": torch.tensor([int(sample["label"]) for sample in samples]),
        }

    def plain_sample(self, length: int, *, is_target: bool) -> Sample:
        """Return padding with an end, of class 0."""
        return {"input_ids": [self.pad_id] * (length - 1) + [self.end_id], "label": 0 if is_target else IGNORED}

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed cross entropy of the classes."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        return summed_cross_entropy(model(**inputs).logits, batch["labels"])
