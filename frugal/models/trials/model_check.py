"""Before a plan: whether a model can be trained for its task at all, and what its gradient depends on besides samples.

A small model of its kind is tried (see `probe`). What makes training worthless is refused, the rest is said.
Of a model of text it is also asked:

- Does it keep packed documents apart?
- Can its samples be split over ranks? What mixes positions outside attention (convolutions, recurrences, biases of its
  own) or depends on the number of a head changes the gradient of the parts. The parts are rows of one batch here, so no
  ranks are needed. A model may also count the positions of a part, though it gets them as input, and use them in a way
  that shows for long samples only, as Llama 4's attention temperature does. So a model that counts as far as a part
  reaches is refused, too.
- Is what frugal trains the loss that the model's authors have given it?
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from frugal.config.request import BatchNormChoice
from frugal.errors import RequestError, first_line, logger, refuse
from frugal.models import batch_norm, packs, sequence_parallel, transformers_internals
from frugal.models.losses import own_loss
from frugal.models.objectives import (
    Batch,
    CausalLM,
    MaskedLM,
    MeanLoss,
    Objective,
    Sample,
    Seq2Seq,
    SequenceClassification,
)
from frugal.models.spec import OWN, ModelSpec, heads
from frugal.models.trials import probe
from frugal.models.trials.probe import FEW_SAMPLES, NUM_SAMPLES, Dependence
from frugal.models.trials.small_model import NoSmallModelError, is_small, tried
from frugal.planning.plan import Plan
from frugal.planning.report import DRAWN_PARTS, DRAWS, DROPOUT, LAYER_DROP, PADDING_MATTERS, SPLIT_MATTERS
from frugal.units import IGNORED, plural

_NAMED = 4

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)

_LENGTHS = (32, 17)
"""Tokens of samples of which one pads the other."""


@dataclass(frozen=True, kw_only=True)
class ModelTrial:
    """The findings of runs of a model.

    Attributes:
        split: whether the gradient depends on how a batch is split.
        forwards: whether it depends on the forwards that were done before.
        drawn: parameters that random draws leave out of a micro-batch.
        reused: parameters of an own model whose gradient arrives more than once in a backward, see `probe.arrivals`.
        padding: whether it depends on padding; None: not tried, because an objective makes its own batches, or the
            split matters already.
        later_tokens: see `probe.on_later_tokens`; None: nothing that predicts the next token.
        random: notes on what training draws at random: dropout's masks, and other numbers, such as noise.
        unused: trained parameters of an own model that get no gradient from a batch.
        missing: values of samples that they may not lack where forward returns a mean, see `probe.lacking`.
    """

    split: Dependence
    random: Sequence[str]
    forwards: Dependence
    drawn: Sequence[str]
    reused: Sequence[str]
    padding: Dependence | None
    later_tokens: float | None
    unused: Sequence[str]
    missing: Sequence[str]

    @property
    def is_causal(self) -> bool:
        """Return whether its output for a token depends on no later one."""
        return self.later_tokens is None or self.later_tokens <= probe.MOST_LEAKAGE


def trial(
    model: nn.Module, objective: Objective, *, task: str, vocab_size: int, max_positions: int | None
) -> ModelTrial:
    """Run `model`, which is on the CPU and small, for `task`. Its weights stay as they are."""
    transformers_internals.always_use()
    tokens = _tokens(vocab_size, max_positions)
    takes_means, is_own = isinstance(objective, MeanLoss), task == OWN
    if is_own:
        objective = probe.by_samples(objective)
        batches = probe.examples(model, objective, tokens.shape[1])
    else:
        batches = [objective.collate([_sample(task, objective, row) for row in tokens])]
    batch = batches[0]
    later_tokens = probe.on_later_tokens(model, tokens[:FEW_SAMPLES], vocab_size) if task == "causal-lm" else None
    splits = [probe.on_split(model, objective, each) for each in batches]
    split = next(filter(None, splits), splits[0])
    padding = None
    if not is_own and not split:
        ragged = [_sample(task, objective, row[:length]) for row, length in zip(tokens, _LENGTHS, strict=False)]
        padding = probe.on_padding(model, objective, ragged)
    watched = probe.watch(model, objective, batch)
    arrived = probe.arrivals(model, objective, batch) if is_own else {}
    notes = {DROPOUT: watched.has_dropout, DRAWS: watched.has_draws}
    return ModelTrial(
        split=split,
        random=[note for note, holds in notes.items() if holds],
        forwards=probe.on_forwards(model, objective, batch),
        drawn=probe.on_draws(model, objective, batch),
        reused=[name for name, number in arrived.items() if number > 1],
        padding=padding,
        later_tokens=later_tokens,
        unused=[name for name, number in arrived.items() if number == 0],
        missing=[
            name
            for name, changed in (probe.lacking(model, objective, batch) if takes_means and not split else ())
            if probe.on_split(model, objective, changed)
        ],
    )


def _tokens(vocab_size: int, max_positions: int | None) -> Tensor:
    """Return random tokens of `NUM_SAMPLES` samples."""
    seq_len = min(probe.MOST_TOKENS, max_positions or probe.MOST_TOKENS)
    low = min(5, vocab_size - 1)  # beyond the usual special tokens
    return torch.randint(low, vocab_size, (NUM_SAMPLES, seq_len), generator=torch.Generator().manual_seed(0))


def _sample(task: str, objective: Any, tokens: Tensor) -> Sample:
    """Return a sample of the task; of pairs, both sides have the same length."""
    row = tokens.tolist()
    if task == "seq2seq":
        return {"input_ids": row, "labels": row[::-1]}
    if task == "sequence-classification":
        return {"input_ids": [*row[:-1], objective.end_id], "label": row[0] % 2}
    return {"input_ids": row}


def check_model(
    spec: ModelSpec, choice: BatchNormChoice | None = None, *, has_low_stage: bool = False
) -> tuple[str, ...]:
    """Return notes for the user on a model before it is trained; `choice`: whose statistics BatchNorm takes.

    `has_low_stage`: it will be trained under ZeRO-0 or 1. What adapters are put into is tried without them: they change
    nothing of it but by their dropout.

    Raises:
        RequestError: it cannot be trained for its task.
    """
    if spec.lora is not None:
        notes_of_base = check_model(replace(spec, lora=None, quantize=None), choice, has_low_stage=has_low_stage)
        drops = spec.lora.dropout > 0 and DROPOUT not in notes_of_base
        return (*notes_of_base, DROPOUT) if drops else notes_of_base
    whole = spec.build(dtype=torch.float32, device="meta")
    if choice == "frozen":
        batch_norm.check(whole)
    encoders = {"vision_config": "images", "audio_config": "sound"}
    others = [what for name, what in encoders.items() if getattr(spec.config, name, None) is not None]
    notes = []
    if others and spec.task != OWN:
        notes.append(f"{spec.reference} could read {' and '.join(others)}, too: {spec.task} trains it on text alone")
    if spec.layer_drop:
        notes.append(
            f"{LAYER_DROP}: {' and '.join(f'{name} {share:g}' for name, share in spec.layer_drop)} set to 0, because "
            "ranks would leave out different layers"
        )
    if spec.has_own_loss() and (added := own_loss.depends_on_split(spec.config)) is not None:
        notes.append(f"{SPLIT_MATTERS}: {added}")
    if isinstance(spec.own_objective, MeanLoss):
        notes.append(f"the loss is what forward returns, taken as a mean over {spec.own_objective.counted}")
    try:
        done, small, model = _trial(spec, choice)
    except NoSmallModelError as error:
        normalising = batch_norm.modules(whole) if choice != "frozen" else {}
        for name, module in list(normalising.items())[:1]:
            which = _which(name, type(module).__name__, len(normalising))
            notes.append(f"{SPLIT_MATTERS}: {which} normalise by statistics of the samples of a micro-batch")
        if not normalising:
            notes.append(f"whether the gradient depends on the split or on padding could not be tried: {error}")
        return (*notes, *[DROPOUT] * any(isinstance(each, _DROPOUTS) and each.p for each in whole.modules()))
    if not done.is_causal:
        raise _not_causal(spec, done)
    if not has_low_stage:
        _refuse_reuse(spec.reference, done)
    if spec.task != OWN:
        objective, tokens = small.objective(), _tokens(small.vocab_size or 2, small.max_positions)
        check_loss(small, model, objective, _sample(spec.task, objective, tokens[0]))
    if done.split and done.split.modules is None and isinstance(spec.own_objective, MeanLoss):
        _refuse_other_means(spec.reference, model, spec.own_objective)
    if done.split:
        notes.append(_split_note(done.split) + (_remedy(spec, choice) if batch_norm.modules(whole) else ""))
    notes += _notes_of_forwards(done)
    if done.padding:
        notes.append(
            f"{PADDING_MATTERS}: that of a small model of this kind for samples of {_LENGTHS[0]} and {_LENGTHS[1]} "
            f"tokens in one micro-batch differs by {_percent(done.padding.difference)} from the sum of each alone"
        )
    notes += done.random
    if done.unused:
        few = ", ".join(done.unused[:_NAMED]) + (", ..." if len(done.unused) > _NAMED else "")
        notes.append(
            f"{plural(len(done.unused), 'trained parameter')} ({few}) got no gradient from a batch of {NUM_SAMPLES} "
            "samples: PyTorch and ZeRO-0 leave what a whole global batch does not use, ZeRO-1 to 3 continue its weight "
            "decay and momentum"
        )
    return tuple(notes)


def _refuse_other_means(reference: str, model: nn.Module, objective: MeanLoss) -> None:
    """Refuse a mean loss that does not add up with its targets as they are counted, and does with another count.

    Raises:
        RequestError: how to count them.
    """
    own = probe.by_samples(objective)
    batches = probe.examples(model, own, probe.MOST_TOKENS)

    def adds_up(other: Objective) -> bool:
        return not any(probe.on_split(model, probe.by_samples(other), batch) for batch in batches)

    refuse(
        (
            adds_up(objective.summed),
            f"the loss that {reference} returns is a sum over samples",
            f"the loss of {NUM_SAMPLES} samples is that of micro-batches of {FEW_SAMPLES}, added up",
            "return their mean: divide it by the number of samples in forward",
        )
    )
    for words, other in objective.recounted(
        probe.left_out(model, own, batches[0]),
        probe.whole_numbers(objective.example(NUM_SAMPLES, probe.MOST_TOKENS)),
    ).items():
        refuse(
            (
                adds_up(other),
                f"the loss that {reference} returns is no mean over {objective.counted}",
                f"micro-batches of {FEW_SAMPLES} samples then have another gradient than one of {NUM_SAMPLES}",
                f"return module, frugal.MeanLoss(example=..., count=lambda batch: {words})",
            )
        )


def say_of_objective(model: nn.Module, objective: Objective, plan: Plan, rank: int) -> None:
    """Warn of what the gradient of a caller's own objective depends on, where the plan was made for another task.

    A copy of the model is tried if it is small and on the CPU. The ranks come to the same.

    Raises:
        RequestError: it cannot be trained under the planned stage.
    """
    parameters = list(model.parameters())
    is_known = plan.model.task == OWN or isinstance(objective, CausalLM | MaskedLM | Seq2Seq | SequenceClassification)
    if is_known or {parameter.device.type for parameter in parameters} != {"cpu"} or not is_small(model):
        return
    try:
        done = trial(
            copy.deepcopy(model).float().train(), objective, task=OWN, vocab_size=2, max_positions=plan.request.seq_len
        )
    except Exception:  # whatever a model trips over; its training will say it better
        return
    if plan.strategy.zero_stage > 1:
        _refuse_reuse(type(model).__name__, done)
    if rank != 0:
        return
    if done.split and not batch_norm.modules(model):  # of these `apply_planned` says it
        logger.warning(_split_note(done.split))
    for note in _notes_of_forwards(done):
        logger.warning(note)


def _refuse_reuse(reference: str, done: ModelTrial) -> None:
    """Raises: RequestError."""
    if done.reused:
        raise RequestError(
            f"{reference} cannot be trained under ZeRO-2 or 3",
            because=f"the gradient of `{done.reused[0]}` arrives more than once in a backward: reentrant activation "
            "checkpointing of a module that is used several times; DeepSpeed reduces a gradient when it arrives",
            hint="checkpoint(..., use_reentrant=False), or --zero-stage 1 --precision fp32",
        )


def _trial(spec: ModelSpec, choice: BatchNormChoice | None = None) -> tuple[ModelTrial, ModelSpec, nn.Module]:
    """Return what the smallest model of the kind that runs has shown, and that model. Raises as `tried`."""

    def run(small: ModelSpec, model: nn.Module) -> tuple[ModelTrial, ModelSpec, nn.Module]:
        batch_norm.apply(model, choice)
        done = trial(
            model, small.objective(), task=small.task, vocab_size=small.vocab_size or 2,
            max_positions=small.max_positions,
        )  # fmt: skip
        return done, small, model

    return tried(spec, run)


def _split_note(split: Dependence) -> str:
    apart = (
        f"gradients of a small model of this kind differ by {_percent(split.difference)} between micro-batches of "
        f"{NUM_SAMPLES} and of {FEW_SAMPLES}"
    )
    if split.modules is None:
        return f"{SPLIT_MATTERS}: its loss is not a sum over samples; {apart}"
    return f"{SPLIT_MATTERS}: in {_which(*split.modules)} samples of a micro-batch change each other; {apart}"


_PARAMETERS = "parameters (it lasts at ZeRO-0 only, of frozen ones below ZeRO-3)"


def _notes_of_forwards(done: ModelTrial) -> list[str]:
    """Return what is to be said of forwards that change the next one, or that leave parameters or samples out."""
    notes = []
    if done.forwards.modules is not None:
        notes.append(
            f"{SPLIT_MATTERS}: in {_which(*done.forwards.modules)} a forward changes "
            + (_PARAMETERS if done.forwards.difference <= probe.MOST_CARRIED else "what the next one computes")
            + ", so the number of micro-batches matters; the gradient of the same samples and weights in a small model "
            f"of this kind differs by {_percent(done.forwards.difference)} after {NUM_SAMPLES // FEW_SAMPLES} of them"
        )
    if done.drawn:
        more = f" and {len(done.drawn) - 1} more" if len(done.drawn) > 1 else ""
        notes.append(
            f"{DRAWN_PARTS}: each rank leaves out `{done.drawn[0]}`{more} or not in each micro-batch; ZeRO-2 and 3 "
            "need the same parameters on all ranks: draw from the batch, or use --zero-stage 1 --precision fp32"
        )
    if done.missing:
        names = " or ".join(f"`{name}`" for name in done.missing)
        notes.append(
            f"where samples lack {names} ({IGNORED} or NaN), {SPLIT_MATTERS}: a mean then leaves out others than the "
            "count of targets; divide each sum by all samples, and count these"
        )
    return notes


def _which(name: str, kind: str, number: int) -> str:
    """Name the modules of one kind, of which `name` is the first; it is empty for the model itself."""
    if number > 1:
        return f"{number} {kind} (the first is `{name}`)"
    return f"{kind} `{name}`" if name else kind


def _remedy(spec: ModelSpec, choice: BatchNormChoice | None) -> str:
    """Name the setting of BatchNorm that helps, where it was tried and does."""
    try:
        helps = choice is None and not _trial(spec, "frozen")[0].split
    except NoSmallModelError:
        return ""
    return "; with --batch-norm frozen, which uses running statistics, they do not" if helps else ""


def _not_causal(spec: ModelSpec, done: ModelTrial) -> RequestError:
    because = [
        f"later tokens change what it says of earlier ones, by {_percent(done.later_tokens or 0)} of what they change "
        "at all"
    ]
    if done.padding:
        because.append(f"padding alone changes the gradient by {_percent(done.padding.difference)}")
    tasks = ("masked-lm", "seq2seq", "sequence-classification") if spec.factory is None else ()
    fitting = [f"--task {task}" for task in tasks if heads(task, spec.config.model_type)]
    return RequestError(
        f"{spec.reference} cannot be trained as causal-lm: it sees the tokens that it is to predict",
        because=because,
        hint=f"use {', or '.join([*fitting, 'an objective of your own, see docs/tutorials/own-model.md'])}",
    )


def _percent(part: float) -> str:
    return f"{100 * part:.2g} %" if part < 1 else f"{100 * part:.0f} %"


# Of models of text


DOCUMENTS = (13, 9)
"""Tokens of the two documents that are packed."""

MOST_LEAKAGE = 1e-3
"""The most that another document may change, as a part of its effect unpacked: rounding is far below."""

_PACKING_HINT = "leave --pack out: samples of like length share a micro-batch, which pads little"
_WHY_NOT_PACKED = {
    "masked-lm": "a model that reads in both directions knows padding only, not documents",
    "seq2seq": "each target text has a source text of its own",
    "sequence-classification": "a sample has one class",
    OWN: "its loss is Python of its own, and makes its batches itself",
}


def check_packing(spec: ModelSpec) -> None:
    """Refuse to pack for a model that would let documents see each other.

    Raises:
        RequestError: with the reason.
    """
    reason = _WHY_NOT_PACKED.get(spec.task)
    try:
        leak = 0.0 if reason else tried(spec, lambda _, model: leakage(model))
    except NoSmallModelError as error:
        reason = f"whether it keeps documents apart could not be tried: {error}"
    else:
        if not leak <= MOST_LEAKAGE:  # NaN is none
            reason = f"what it says of a document depends on the one before it, to {100 * leak:.1f} % of the whole"
    refuse((reason, f"--pack is impossible for {spec.reference}", reason or "", _PACKING_HINT))


def leakage(model: nn.Module) -> float:
    """Return what a document changes in the logits of the next in its pack, as a part of what it changes unpacked."""
    model.eval()
    together = torch.randint(5, 200, (1, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(0))
    position_ids = torch.from_numpy(packs.positions(DOCUMENTS))[None]

    def logits(tokens: Tensor, **inputs: Tensor) -> Tensor:
        return model(input_ids=tokens, **inputs).logits[0].float()

    with torch.no_grad():
        alone = torch.cat([logits(document) for document in together.split(DOCUMENTS, dim=1)])
        following = logits(together)
        with packs.documents_kept_apart():
            packed = logits(together, position_ids=position_ids)
    unpacked = float((following - alone).abs().max())
    return float((packed - alone).abs().max()) / unpacked if unpacked else 0.0


NUM_PARTS = 2

PART_LENGTHS = (38, 27)
"""Tokens of the samples that are run, the longer one a multiple of the parts. A part has as many as nothing else."""

MOST_OF_PARTS = 1e-4
"""The largest relative difference of gradients: rounding is below 1e-6, a window that ends at a border above 1e-2."""


def check_sequence_parallel(spec: ModelSpec, size: int, *, pack: bool) -> None:
    """Refuse to split the samples of a model over `size` ranks where its gradient would be another.

    Raises:
        RequestError: with the reason.
    """
    reasons = {
        f"it trains {spec.task}; only causal-lm is known to be split right": spec.task != "causal-lm",
        "its loss is its own, of whole sequences": spec.has_own_loss(),
    }
    sequence_parallel.refuse_for(spec.reference, size, reasons)
    spec = replace(spec, lora=None, quantize=None)  # adapters and packed weights are of positions each
    sequence_parallel.refuse(spec.build(dtype=torch.float32, device="meta"), size)
    transformers_internals.always_use()

    def run(small: ModelSpec, model: nn.Module) -> tuple[float, int, bool]:
        sequence_parallel.refuse(model, NUM_PARTS)
        with patch.object(torch, "arange", wraps=torch.arange) as arange:
            dependence, num_calls = on_parts(model, small.vocab_size or 2, pack=pack)
        counts = any(PART_LENGTHS[0] // NUM_PARTS in call.args[:2] for call in arange.call_args_list)
        return dependence.difference, num_calls, counts

    difference, num_calls, counts, untried = 0.0, 0, False, ""
    try:
        difference, num_calls, counts = tried(spec, run)
    except NoSmallModelError as error:
        untried = str(error)
    reasons = {
        f"whether parts train as the whole does could not be tried: {untried}": bool(untried),
        "its attention does not go through transformers' attention functions": not num_calls,
        f"the gradient of a small one in {NUM_PARTS} parts differs by {100 * difference:.2g} %: not only its attention "
        "mixes positions": difference > MOST_OF_PARTS,
        "it counts the positions of a part from 0 and ignores those that it is given": counts,
    }
    sequence_parallel.refuse_for(spec.reference, size, reasons)


def on_parts(model: nn.Module, vocab_size: int, *, pack: bool = False, size: int = NUM_PARTS) -> tuple[Dependence, int]:
    """Compare gradients of samples in `size` parts with whole ones; count how often attention was split."""
    whole, generator = CausalLM(packed=pack), torch.Generator().manual_seed(0)
    low = min(5, vocab_size - 1)  # beyond the usual special tokens
    rows_of_ids = [torch.randint(low, vocab_size, (length,), generator=generator).tolist() for length in PART_LENGTHS]
    samples = [
        {"input_ids": row, "documents": [len(row) // 3, len(row) - len(row) // 3] if pack else [len(row)]}
        for row in rows_of_ids
    ]
    parts = [sequence_parallel.parts_of(whole, size, rank) for rank in range(size)]
    batches = [part.collate(samples) for part in parts]
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    alone = probe.gradient(model, whole, [whole.collate(samples)])
    split, copied = sequence_parallel.SplitInOneProcess(size), copy.deepcopy(model)
    sequence_parallel.apply(copied, split)
    return Dependence(probe.difference(alone, probe.gradient(copied, parts[0], [rows]))), split.num_calls


MOST_OF_LOSS = 1e-3
"""The largest relative difference that rounding explains."""


def check_loss(spec: ModelSpec, model: nn.Module, objective: Objective, sample: Sample) -> None:
    """Refuse a task for which `model`, a small one of the kind of `spec`, has another loss than `objective`.

    Of the ways to ask a model for its loss the one counts whose answer is nearest.

    Raises:
        RequestError: it has, or takes no text.
    """
    if not hasattr(model, "config"):
        return
    what = f"{spec.reference} cannot be trained as {spec.task}"
    refuse(
        (
            spec.task == "masked-lm" and getattr(model.config, "is_encoder_decoder", False),
            what,
            "its decoder reads the targets, and of masked text most are none",
            "use --task seq2seq",
        )
    )
    batch = objective.collate([sample])
    ways: list[Batch] = [{n: batch[n] for n in ("input_ids", "attention_mask", "labels") if n in batch}]
    if spec.task == "causal-lm":  # decoders of encoder-decoders want labels that are moved already
        ways.append(ways[0] | {"labels": nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)})
    if spec.task == "seq2seq" and hasattr(model, "prepare_decoder_input_ids_from_labels"):
        ways.append(ways[0] | {"decoder_input_ids": batch["decoder_input_ids"]})  # a few make these in a method only
    theirs, reason = [], ""
    with torch.no_grad(), probe.restored(model):
        model.eval()
        ours = objective.loss_sum(model, batch).item() / objective.count(batch)
        for inputs in ways:
            try:
                theirs.append(model(**inputs).loss.item())
            except Exception as error:  # whatever a model trips over
                reason = reason or first_line(error)
    nearest = min(theirs, key=lambda loss: abs(loss - ours), default=ours)
    refuse(
        (
            not theirs,
            what,
            f"its own loss of text alone fails: {reason}",
            "give a factory that returns (module, objective), with what else it reads in the samples",
        ),
        (
            abs(ours - nearest) > MOST_OF_LOSS * max(abs(nearest), 1e-6),
            what,
            f"of a small model of its kind, its own loss is {nearest:.4f} a target, and the cross entropy {ours:.4f}",
            "give a factory that returns (module, objective), with its loss as objective",
        ),
    )
