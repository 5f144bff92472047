"""The verdict on a run at its own settings, by a dry run of exactly these, and the smallest change that makes it fit.

Single changes come first, those that cost no time before others. None of them changes what is trained: the global
batch, the precision, the optimizer and the adapters stay.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Request
from frugal.deepspeed_adapter.json_config import MICRO_BATCH
from frugal.errors import FrugalError
from frugal.planning.batch import BatchPlan
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.search.candidate import Source
from frugal.planning.search.evaluate import Fitting
from frugal.planning.strategy import BUCKET_ELEMENTS, Strategy
from frugal.units import plural


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A request that pins only the model's own numbers, with the strategy and the batch of the configuration."""

    request: Request
    cluster: Cluster
    strategy: Strategy
    batch: BatchPlan


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a dry run. `host_shortfall_bytes`, `disk_shortfall_bytes`: missing on a node, 0 where not known."""

    subject: Subject
    memory: MemoryBreakdown
    host_shortfall_bytes: int = 0
    disk_shortfall_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Return whether device, host and disk are large enough."""
        return self.memory.fits and not self.host_shortfall_bytes and not self.disk_shortfall_bytes


def verdict_of(subject: Subject, source: Source) -> Verdict:
    """Dry-run exactly this subject on each kind of device. Raises as `Source.dry_run`."""
    steps = subject.batch.accumulation_steps
    fitting = Fitting(subject.request, subject.cluster)
    of_devices = [
        source.dry_run(subject.strategy, micro, steps, device) for device, micro in fitting.loads(subject.batch)
    ]
    memory = min(of_devices, key=lambda memory: memory.headroom_bytes)
    return Verdict(
        subject=subject,
        memory=memory,
        host_shortfall_bytes=max(0, fitting.host_shortfall_bytes(memory)),
        disk_shortfall_bytes=max(0, fitting.disk_shortfall_bytes(subject.strategy, source.facts())),
        notes=source.notes,
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a configuration that fits. `fields`: new values of DeepSpeed's and the trainer's fields, by dotted
    names."""

    words: str
    fields: Mapping[str, Any]
    verdict: Verdict


def smallest(subject: Subject, source: Source) -> Change | None:
    """Return the first change that fits by its profile, in which the allocator is replayed, and by its dry run; None
    if no change that is tried fits."""
    fitting = Fitting(subject.request, subject.cluster)
    for words, changed in _changed(subject):
        try:
            if changed.strategy.zero_stage:  # stage 0 may be a run without DeepSpeed, which has no profile
                profile = source.profile(changed.strategy, changed.batch.accumulation_steps > 1)
                drafts = [profile.memory(micro, device) for device, micro in fitting.loads(changed.batch)]
                if any(not each.fits or fitting.host_shortfall_bytes(each) > 0 for each in drafts):
                    continue
            verdict = verdict_of(changed, source)
        except FrugalError:  # the model cannot be trained like that
            continue
        if verdict.fits:
            return Change(words=words, fields=_fields(subject, changed), verdict=verdict)
    return None


def _changed(subject: Subject) -> Iterator[tuple[str, Subject]]:
    """Yield single changes in words and as they come out, then all free ones together, then costly ones, alone and two
    at a time, together with the free ones."""
    strategy, batch = subject.strategy, subject.batch
    to_cpu = {"offload_optimizer": "cpu", "zero_stage": max(2, strategy.zero_stage)}
    optimizer = "cpu" if strategy.offload_optimizer == "none" else strategy.offload_optimizer
    rows: list[tuple[object, bool, str, dict[str, Any]]] = [  # applies, costs time, in words, what is changed
        (not strategy.expandable_segments, False, "let torch's segments grow", {"expandable_segments": True}),
        (
            strategy.zero_stage and strategy.reduce_bucket_elements > BUCKET_ELEMENTS,
            False,
            f"make the gradient bucket smaller ({strategy.reduce_bucket_elements:,} elements are reserved on every "
            "GPU)",
            {"reduce_bucket_elements": BUCKET_ELEMENTS, "overlap_comm": False},
        ),
        (
            strategy.activation_checkpointing == "off",
            True,
            "recompute activations",
            {"activation_checkpointing": "full"},
        ),
        *(
            (batch.world_size > 1, True, f"use ZeRO stage {stage}", {"zero_stage": stage})
            for stage in range(max(2, strategy.zero_stage + 1), 4)
        ),
        (strategy.offload_optimizer == "none", True, "keep the optimizer in host memory", to_cpu),
        (
            strategy.offload_parameters == "none",
            True,
            "keep optimizer and parameters in host memory",
            {"zero_stage": 3, "offload_optimizer": optimizer, "offload_parameters": "cpu"},
        ),
    ]
    free = [(words, changes) for applies, costs, words, changes in rows if applies and not costs]
    slower = [(words, changes) for applies, costs, words, changes in rows if applies and costs]
    costly = [*_smaller_micro_batches(batch), *slower]
    combined = [[each] for each in (*free, *costly)]
    combined += [free] if len(free) > 1 else []
    combined += [[*free, *more] for more in (*([each] for each in costly), *pairwise(slower))]
    for together in combined:
        changes = {
            name: value
            for _, changed in together
            for name, value in changed.items()
            if name == "batch" or value != getattr(strategy, name)
        }
        made = replace(subject, batch=changes.pop("batch", batch))
        yield ", and ".join(words for words, _ in together), replace(made, strategy=replace(strategy, **changes))


def _smaller_micro_batches(batch: BatchPlan) -> Iterator[tuple[str, dict[str, Any]]]:
    for micro in range(batch.largest_micro_batch // 2, 0, -1):
        if batch.largest_micro_batch % micro == 0:
            caps = (micro,) * len(batch.micro_batch)
            smaller = BatchPlan.of(batch.global_batch, caps, sequence_parallel=batch.sequence_parallel)
            steps = plural(smaller.accumulation_steps, "accumulation step")
            yield f"micro-batch {micro} with {steps}, which is the same global batch", {"batch": smaller}


_FIELDS: Mapping[str, tuple[str, Mapping[Any, Any]]] = {
    "expandable_segments": ("PYTORCH_CUDA_ALLOC_CONF", {True: "expandable_segments:True"}),
    "reduce_bucket_elements": ("zero_optimization.reduce_bucket_size", {}),
    "overlap_comm": ("zero_optimization.overlap_comm", {}),
    "activation_checkpointing": ("gradient_checkpointing", {"full": True}),
    "zero_stage": ("zero_optimization.stage", {}),
    "offload_optimizer": ("zero_optimization.offload_optimizer.device", {}),
    "offload_parameters": ("zero_optimization.offload_param.device", {}),
}
"""The field of a configuration for each field of a strategy that a change may touch, and values written otherwise."""


def _fields(before: Subject, after: Subject) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if after.batch != before.batch:
        fields[MICRO_BATCH] = after.batch.largest_micro_batch
        fields["gradient_accumulation_steps"] = after.batch.accumulation_steps
    for name, (field, written) in _FIELDS.items():
        value = getattr(after.strategy, name)
        if value != getattr(before.strategy, name):
            fields[field] = written.get(value, value)
    if any("offload" in field for field in fields):  # DeepSpeed's own default is stage 0, which offloads nothing
        fields["zero_optimization.stage"] = after.strategy.zero_stage
    return fields
