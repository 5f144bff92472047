"""The dry run of a user's own step: its memory on a card that is not there, with or without DeepSpeed."""

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # imported by the first operator that needs it, it would keep the frames of the script
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from frugal.config.hardware.cluster import ASSUMED_CAPABILITY, Cluster, Device
from frugal.config.schema import understand
from frugal.deepspeed_adapter import stages
from frugal.deepspeed_adapter.simulate.fake_device import pretend
from frugal.dryrun.compare import predicted
from frugal.dryrun.figures import Figures
from frugal.dryrun.messages import DryRun
from frugal.dryrun.trace.cuda_kernels import kernels_of
from frugal.dryrun.trace.recorder import not_collected
from frugal.errors import RequestError
from frugal.planning.memory.timeline import FORWARD
from frugal.tools.own_loop.card import pretended_card
from frugal.tools.own_loop.script import Script
from frugal.tools.own_loop.tracker import LoopTracker, kept_by_model, kept_by_optimizer

NUM_STEPS = 2
"""Steps of a dry run: the first makes gradients and states, the second is as all later ones."""

MAX_RANKS = 3
"""Ranks that are dry-run of a larger world: the first, the last, and one in between."""


@dataclass(frozen=True, kw_only=True)
class LoopFigures(Figures):
    """The figures of a user's own loop. Everything is in bytes.

    Attributes:
        notes: assumptions about data.
    """

    notes: tuple[str, ...] = ()


def dry_run(
    step: Callable[..., Any],
    *,
    gpu: str | None = None,
    mem: str | None = None,
    gpus: int = 1,
    steps: int = NUM_STEPS,
    expandable_segments: bool = False,
    torch_version: str | None = None,
    **parts: Any,
) -> LoopFigures:
    """Return the memory of `step` on a GPU, from a dry run on tensors without storage. No GPU is needed.

    `parts` has for each parameter of `step` a function that makes it, or the value itself: `model=...`,
    `optimizer=...`, `batch=...`. Functions may take other parts by name. All are called on the pretended card, where
    `cuda` works as on a GPU; `batch` is called anew before every step.

    Args:
        step: one optimizer step of yours.
        gpu: a card, such as `rtx3060-12g`; see `frugal plan --help`.
        mem: its memory, such as `12G`, if it is not the card's own.
        gpus: the world size that DeepSpeed is to see.
        steps: how often `step` is called. Two show the peak of all later ones: optimizer states exist in the second.
        expandable_segments: whether `PYTORCH_ALLOC_CONF` is to say `expandable_segments:True`.
        torch_version: of the run, such as `2.6`, if it is another than this one; decides cuBLAS's workspaces.
        parts: the arguments of `step`, by name.

    Raises:
        RequestError: a part is missing, or the step cannot be dry-run.
    """
    settings: dict[str, Any] = {"gpus": gpus, "gpu": gpu, "mem": mem, "model": "gpt2", "precision": "fp32"}
    if gpu is None and mem is None:
        settings["mem"] = "80G"
    _, cluster, _ = understand({name: value for name, value in settings.items() if value is not None})
    name = getattr(step, "__module__", None) or "the script"
    build = {"expandable_segments": expandable_segments, "torch_version": _version_of(torch_version)}
    runs = dry_runs(lambda: Script(name, step, parts), cluster, steps, **build)
    result = predicted(runs, cluster, expandable_segments=expandable_segments)  # of the fullest rank
    notes = tuple(dict.fromkeys(note for each in runs for note in each.notes))
    return LoopFigures(**vars(result), notes=notes)


def _version_of(torch_version: str | None) -> tuple[int, int] | None:
    """Return the major and minor number of a version.

    Raises:
        RequestError: it is none.
    """
    if torch_version is None:
        return None
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})(?!\d)", torch_version)
    if numbers is None:
        raise RequestError(f"torch_version={torch_version!r} is no version of torch", hint="write it as 2.6 or 2.6.0")
    return int(numbers[1]), int(numbers[2])


def dry_runs(load: Callable[[], Script], cluster: Cluster, num_steps: int, **build: Any) -> list[DryRun]:
    """Dry-run the ranks that may be the fullest. `load` is called for each, on the pretended card; `build`: of torch
    and its allocator, see `LoopTracker`."""
    world_size = cluster.world_size
    ranks = range(world_size) if world_size <= MAX_RANKS else (0, world_size // 2, world_size - 1)
    device = min(cluster.devices, key=lambda device: device.usable_bytes)
    capability = device.compute_capability or ASSUMED_CAPABILITY
    return [
        _dry_run(load, device, rank, world_size, num_steps, LoopTracker(capability, device.resident_threads, **build))
        for rank in ranks
    ]


def _dry_run(
    load: Callable[[], Script], device: Device, rank: int, world_size: int, num_steps: int, tracker: LoopTracker
) -> DryRun:
    capability = device.compute_capability or ASSUMED_CAPABILITY
    card = pretended_card(tracker, name=device.name, total_bytes=device.memory_bytes, capability=capability)

    def begin() -> None:
        gc.collect()
        tracker.mark(FORWARD)

    with (
        pretend(
            rank=rank,
            world_size=world_size,
            side_stream=tracker.side_stream,
            pinning=tracker.host.pinning,
            empty_cache=tracker.empty_cache,
        ),
        kernels_of("cuda", tracker.capability),
        not_collected(),
        register_optimizer_step_post_hook(tracker.stepped),
        card,
    ):
        script = load()
        _follow(tracker, script.prepare())
        script.run(num_steps, before_each=begin, batching=tracker.on_host)
        tracker.mark(FORWARD)
        if not tracker.timeline().fixed:
            raise RequestError(
                f"{script.name} puts nothing on the card",
                because=f"after {num_steps} calls of its step no tensor was there",
                hint="move the model and the batch to it: model.cuda(), batch.cuda()",
            )
        result = DryRun(
            timeline=tracker.timeline(),
            micro_batch=1,
            host_bytes=tracker.host.peak_bytes,
            notes=tracker.notes,
            counts=tracker.counts,
        )
        del script
    gc.collect()
    return result


def _follow(tracker: LoopTracker, part: Any) -> None:
    """Let the tracker know the purpose of a part's tensors, and of the items of lists and dictionaries."""
    if isinstance(part, dict):
        part = list(part.values())
    if isinstance(part, (list, tuple)):
        for each in part:
            _follow(tracker, each)
    elif isinstance(part, nn.Module):
        tracker.follow(part)
        tracker.overlaps |= stages.overlaps(part)
        tracker.keep(lambda: stages.kept_by(part) or kept_by_model(part))
    elif isinstance(part, torch.optim.Optimizer):
        tracker.keep(lambda: kept_by_optimizer(part))
