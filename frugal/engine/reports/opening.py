"""The lines of a run before its first step: what it trains, on what, and what is not as it was planned."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frugal.checkpoint.resume_checks import describe_changes
from frugal.config import sample_lengths
from frugal.config.hardware import local_host
from frugal.config.hardware.cluster import unlike
from frugal.data.corpus import RunData
from frugal.data.mixture import Mixture, epoch_indices
from frugal.data.stream.samples import SampleStream
from frugal.models.spec import OWN, random_weights
from frugal.planning.plan import Plan
from frugal.planning.report import DRAWN_PARTS, LAYER_DROP, PADDING_MATTERS, SPLIT_MATTERS
from frugal.units import format_count, plural


def origin(data: RunData, model: nn.Module) -> str:
    """Describe where weights and tokens come from."""
    spec = data.spec
    if spec.weights is not None:
        weights = f"pretrained weights from {spec.weights}"
        if new := random_weights(model):
            weights += f", but {plural(len(new), 'parameter')} that they lack random: {', '.join(new[:3])}"
            weights += ", ..." if len(new) > 3 else ""
    elif spec.factory is not None:
        weights = f"weights as {spec.reference} makes them"
    else:
        weights = f"random weights ({spec.reference} names none)"
    if spec.lora is not None:
        kept = "" if spec.quantize is None else f" in {spec.quantize}"
        weights += f", frozen{kept}; adapters {spec.lora} are trained"
    return f"{weights}; {data.tokens}"


def describe(plan: Plan, too_long: sample_lengths.TooLong, data: RunData, total_steps: int, steps_done: int) -> str:
    """Describe how long a run trains, on how many ranks and samples, and what is left out of these."""
    batch = plan.batch
    size = plural(batch.global_batch, "sample")
    if batch.global_tokens is not None:  # as many samples as fit, which shorter ones do more of
        size = f"up to {batch.global_tokens} {plan.counted}"
    parts = [
        f"training {plan.request.model} ({format_count(plan.model.parameters)} parameters) for "
        f"{plural(total_steps, 'step')} of {size} on {plural(batch.world_size, 'rank')}",
        f"{data.training.in_words()}; {plural(len(data.validation), 'sample')} for validation"
        if isinstance(data.training, SampleStream)
        else f"{len(data.training)} samples, {len(data.validation)} for validation",
    ]
    if plan.request.pack and not isinstance(data.training, SampleStream):
        full = data.training.lengths.mean() / plan.request.seq_len
        parts.append(f"samples are packed with documents and {100 * full:.1f} % full")
    parts += data.report.left_out(too_long)
    if steps_done:
        parts.append(f"continuing after step {steps_done}")
    return "; ".join(parts)


def lines(
    plan: Plan,
    too_long: sample_lengths.TooLong,
    out: Path,
    data: RunData,
    model: nn.Module,
    total_steps: int,
    steps_done: int,
    changes: tuple[str, ...],
) -> Iterator[str]:
    """Yield what is trained on what; `changes`: what is not as it was when the run stopped."""
    yield origin(data, model)
    yield describe(plan, too_long, data, total_steps, steps_done)
    if changes:
        yield describe_changes(changes, steps_done, out)


def record(plan: Plan, changes: tuple[str, ...], *, is_resumed: bool) -> dict[str, Any]:
    """Return the plan in force and what is installed, for the record of a start."""
    return {
        "resumed": is_resumed,
        "plan_digest": plan.digest,
        "model": plan.request.model,
        "task": plan.model.task,
        "strategy": str(plan.strategy),
        "world_size": plan.batch.world_size,
        "devices": dict(Counter(device.name for device in plan.cluster.devices)),
        "versions": local_host.versions(),
        "changes": list(changes),
    }


def remarks(plan: Plan, data: RunData, device: torch.device, rank: int) -> Iterator[str]:
    """Yield what else the user should know before the first step."""
    is_stream = isinstance(data.training, SampleStream)
    if set(data.report.formats) - {"text"}:
        yield ("of the first rows: " if is_stream else "") + data.report.in_words()
    if isinstance(data.training, Mixture):
        yield data.training.in_words()
    if not is_stream and plan.batch.global_batch > (n := len(data.training)):
        times = f"{plan.batch.global_batch / n:.1f} times"
        yield f"note: a step takes more samples than there are: each of {n} about {times}"
    said = (PADDING_MATTERS, LAYER_DROP, *(SPLIT_MATTERS, DRAWN_PARTS) * (plan.model.task != OWN))  # else by the engine
    yield from (f"note: {note}" for note in plan.warnings if note.startswith(said))
    if others := local_host.other_versions(plan.all_versions):
        yield f"{others}: memory may differ; where `frugal train --plan` starts the ranks, it dry-runs the plan again"
    if plan.request.lengths is not None and not is_stream:
        lengths = data.training.lengths[epoch_indices(data.training)]
        if note := sample_lengths.unlike(plan.request.lengths, len(lengths), int(lengths.sum())):
            yield note
    has_native = plan.strategy.expandable_segments and torch.cuda.get_allocator_backend() == "native"
    if has_native and not any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()):
        yield (
            "torch has no expandable segments here, which the plan counts on: it may run out of memory; "
            "PYTORCH_ALLOC_CONF=expandable_segments:False, for planning too, goes without them"
        )
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        threads = card.multi_processor_count * card.max_threads_per_multi_processor
        if note := unlike(plan.cluster.devices[rank], card.name, (card.major, card.minor), threads):
            yield note
