"""The smallest change that makes a configuration fit: single changes first, those that cost no time before others.

None of them changes what is trained: the global batch, the precision, the optimizer and the adapters stay.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from frugal.deepspeed_adapter.json_config import MICRO_BATCH
from frugal.errors import FrugalError
from frugal.planning.batch import BatchPlan
from frugal.planning.search.candidate import Source
from frugal.planning.strategy import BUCKET_ELEMENTS, Strategy
from frugal.tools.check.verdict import Subject, Verdict, drafted, verdict_of
from frugal.units import plural


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a configuration. `fields`: new values of DeepSpeed's and the trainer's fields, by dotted names;
    `verdict`: of its dry run."""

    words: str
    fields: Mapping[str, Any]
    subject: Subject
    verdict: Verdict | None = None


def smallest(subject: Subject, source: Source) -> Change | None:
    """Return the first change that fits by its profile and by its dry run; None if no change that is tried fits."""
    for change in _changes(subject):
        try:
            if not drafted(change.subject, source):
                continue
            verdict = verdict_of(change.subject, source)
        except FrugalError:  # the model cannot be trained like that
            continue
        if verdict.fits:
            return replace(change, verdict=verdict)
    return None


def _changes(subject: Subject) -> Iterator[Change]:
    """Yield single changes, then all free ones together, then each costly one together with the free ones."""
    free = list(_free(subject))
    yield from free
    costly = list(_costly(subject))
    yield from costly
    together = subject
    for change in free:
        together = replace(together, strategy=_merged(together.strategy, subject.strategy, change.subject.strategy))
    if len(free) > 1:
        yield _both(free, together)
    for change in costly:
        merged = replace(change.subject, strategy=_merged(together.strategy, subject.strategy, change.subject.strategy))
        yield _both([*free, change], merged)
    for first, second in pairwise([change for change in costly if MICRO_BATCH not in change.fields]):
        strategy = _merged(
            _merged(together.strategy, subject.strategy, first.subject.strategy),
            subject.strategy,
            second.subject.strategy,
        )
        yield _both([*free, first, second], replace(subject, strategy=strategy))


def _both(changes: list[Change], subject: Subject) -> Change:
    fields = {name: value for change in changes for name, value in change.fields.items()}
    return Change(words=", and ".join(change.words for change in changes), fields=fields, subject=subject)


def _merged(before: Strategy, original: Strategy, changed: Strategy) -> Strategy:
    """Return `before` with the fields in which `changed` differs from `original`."""
    names = original.__dataclass_fields__
    differing = {name: getattr(changed, name) for name in names if getattr(changed, name) != getattr(original, name)}
    return replace(before, **differing)


def _free(subject: Subject) -> Iterator[Change]:
    """Yield changes that cost no time."""
    strategy = subject.strategy
    if not strategy.expandable_segments:
        yield _of(
            subject,
            "let torch's segments grow",
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            expandable_segments=True,
        )
    if strategy.zero_stage and strategy.reduce_bucket_elements > BUCKET_ELEMENTS:
        yield _of(
            subject,
            f"make the gradient bucket smaller ({strategy.reduce_bucket_elements:,} elements are reserved on "
            "every GPU)",
            {"zero_optimization.reduce_bucket_size": BUCKET_ELEMENTS, "zero_optimization.overlap_comm": False},
            reduce_bucket_elements=BUCKET_ELEMENTS,
            overlap_comm=False,
        )


def _costly(subject: Subject) -> Iterator[Change]:
    """Yield changes that make a step slower, the cheapest first."""
    strategy, batch = subject.strategy, subject.batch
    for micro in range(batch.largest_micro_batch // 2, 0, -1):
        if batch.largest_micro_batch % micro:
            continue
        caps = (micro,) * len(batch.micro_batch)
        steps = batch.global_batch // sum(caps)
        smaller = BatchPlan.of(batch.global_batch, caps, sequence_parallel=batch.sequence_parallel)
        yield Change(
            words=f"micro-batch {micro} with {plural(steps, 'accumulation step')}, which is the same global batch",
            fields={MICRO_BATCH: micro, "gradient_accumulation_steps": steps},
            subject=replace(subject, batch=smaller),
        )
    if strategy.activation_checkpointing == "off":
        yield _of(
            subject,
            "recompute activations",
            {"gradient_checkpointing": True},
            activation_checkpointing="full",
        )
    if batch.world_size > 1:
        for stage in range(max(2, strategy.zero_stage + 1), 4):
            yield _of(subject, f"use ZeRO stage {stage}", {"zero_optimization.stage": stage}, zero_stage=stage)
    if strategy.offload_optimizer == "none":
        yield _of(
            subject,
            "keep the optimizer in host memory",
            {
                "zero_optimization.stage": max(2, strategy.zero_stage),
                "zero_optimization.offload_optimizer.device": "cpu",
            },
            zero_stage=max(2, strategy.zero_stage),
            offload_optimizer="cpu",
        )
    if strategy.offload_parameters == "none":
        yield _of(
            subject,
            "keep optimizer and parameters in host memory",
            {
                "zero_optimization.stage": 3,
                "zero_optimization.offload_optimizer.device": "cpu",
                "zero_optimization.offload_param.device": "cpu",
            },
            zero_stage=3,
            offload_optimizer="cpu" if strategy.offload_optimizer == "none" else strategy.offload_optimizer,
            offload_parameters="cpu",
        )


def _of(subject: Subject, words: str, fields: Mapping[str, Any], **strategy: Any) -> Change:
    return Change(words=words, fields=fields, subject=replace(subject, strategy=replace(subject.strategy, **strategy)))
