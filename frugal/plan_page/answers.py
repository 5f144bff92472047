"""The answers that a page of a plan looks up: memory and seconds of settings around the plan.

They are computed when the page is made, nearest to the plan first, up to a number of them; the page computes and
interpolates nothing. The bytes of a setting are those of `MemoryProfile.memory` on one card, and are compared with all
cards whose sums take the same scratch: `Replays.smallest_capacity` of another card may differ by its tolerance, 0.2 %.
"""

from typing import Any

from frugal.config.hardware.cluster import Device
from frugal.plan_page.sources import (
    OpenDryRuns,
    Place,
    Sources,
    cards,
    chosen_micro_batches,
    is_of_one_kind,
    offload_level,
)
from frugal.plan_page.timelines import FEW_POINTS, MOST_POINTS, picture
from frugal.planning.batch import BatchPlan
from frugal.planning.cost import step_time
from frugal.planning.plan import Plan
from frugal.planning.search.fitting import Fitting
from frugal.planning.strategy import Strategy

MOST_ANSWERS = 400
"""Of one page."""

EVENTS_OF_A_PAGE, EVENTS_OF_A_SMALL_PAGE = 12_000_000, 300_000
"""Events that are replayed for `--html`, and for the page beside plan.json: some 25 seconds, and one. An answer takes
the events of its ranks: 6,700 with distilgpt2 (15 ms), 63,000 with a model of 8B (0.13 s)."""


def answers(plan: Plan, open_source: OpenDryRuns, most_events: int, *, only_known: bool = False) -> dict[str, Any]:
    """Return what a page looks up, in plain types: `timelines` of the plan's strategies, and `answers`.

    `most_events`: after so many replayed events no further strategy, card or length is begun.
    `only_known`: only what needs no new trace.

    Raises:
        WorkerError: a trace crashed.
    """
    numbers: dict[str, int] = {}  # of strategies, by name: sizes of groups, which are in no name, differ with GPUs
    flags: list[str] = []
    found: dict[str, dict[int, dict[str, Any]]] = {}
    largest: dict[str, int] = {}
    is_equal = is_of_one_kind(plan.cluster)
    own_bytes = plan.memory.device_in(plan.cluster).memory_bytes
    planned = dict(reversed(list(chosen_micro_batches(plan))))
    with Sources(plan, open_source, only_known=only_known) as sources:
        timelines = [_timeline(sources, number) for number in range(1 + len(plan.rejected))]
        gpus = sources.gpu_counts() if is_equal else []
        for place in sources.places() if is_equal else []:
            if found and (most_events <= 0 or sum(map(len, found.values())) >= MOST_ANSWERS):
                break
            near = planned.get(place.strategy, plan.batch.largest_micro_batch)
            of_place, fits, num_events = _answers_of(sources, place, near, is_own=not found)
            most_events -= num_events
            if not of_place:
                continue
            number = numbers.setdefault(str(place.strategy), len(numbers))
            if number == len(flags):
                flags.append(_flags(place.strategy))
            key = f"{place.gpus}/{place.request.seq_len}/{number}/{place.device.resident_threads}"
            found[key] = of_place
            if place.device.memory_bytes == own_bytes:
                largest[key] = fits
    return {
        "answers": found,
        "largest": largest,
        "strategies": [{"name": name, "flags": flags[number]} for name, number in numbers.items()],
        "timelines": timelines,
        "devices": {str(number): [_device(each.devices[0]) for each in cards(plan, number)] for number in gpus},
    }


def _timeline(sources: Sources, number: int) -> dict[str, Any] | None:
    """Return the picture of a strategy of the plan, by its row in the table, from 0 on; None: only dry runs could tell.

    Its slack is the search's, so that nothing is replayed; a strategy that was not fully evaluated has none.
    """
    plan = sources.plan
    strategy, micro_batch = list(chosen_micro_batches(plan))[number]
    place = sources.own_place(strategy)
    batch = plan.batch
    if number and is_of_one_kind(plan.cluster):
        batch = _batch(place, micro_batch)
    profile = sources.profile(place, _accumulates(place, batch.accumulation_steps))
    if profile is None:
        return None
    device = plan.memory.device_in(plan.cluster)
    memory = (profile.draft if number else profile).memory(micro_batch, device)
    total = plan.rejected[number - 1].peak_bytes if number and not plan.rejected[number - 1].is_bound else None
    slack = max(0, total - memory.total_bytes) if total else memory.slack
    drawn = picture(profile.ranks, memory, micro_batch, FEW_POINTS if number else MOST_POINTS)
    drawn["parts"]["slack"] = slack
    return drawn | {"microBatch": micro_batch, "total": memory.total_bytes - memory.slack + slack}


def _answers_of(
    sources: Sources, place: Place, near: int, *, is_own: bool
) -> tuple[dict[int, dict[str, Any]], int, int]:
    """Return answers by micro-batch, the largest micro-batch that fits the place's card, and the events replayed."""
    accumulating = sources.profile(place, accumulates=True)
    if accumulating is None:
        return {}, 0, 0
    fitting = Fitting(place.request, place.cluster)
    cap = fitting.cap
    largest = accumulating.largest_micro_batch(place.device, cap)
    wanted = {1, near // 2, near, 2 * near, largest}
    at_once = sources.profile(place, accumulates=False)
    if at_once is not None and at_once.fits(fitting.samples_per_rank, place.device):
        wanted.add(fitting.samples_per_rank)  # in a single micro-step, which takes less than one of several
    if is_own:
        wanted |= {near - 1, near + 1, largest + 1, *(1 << power for power in range(cap.bit_length()))}
    made = {}
    num_events = sum(len(rank.timeline.events) for rank in accumulating.ranks)
    for size in sorted(size for size in wanted if 1 <= size <= cap):
        batch = _batch(place, size)
        micro_batch = batch.largest_micro_batch
        profile = sources.profile(place, _accumulates(place, batch.accumulation_steps))
        if profile is None or micro_batch in made:
            continue
        memory = profile.memory(micro_batch, place.device)
        time = step_time(profile.costs, place.strategy, batch, place.cluster, place.request)
        made[micro_batch] = {
            "needed": memory.total_bytes - memory.context,
            "cut": batch.arithmetic(place.cluster.rank_noun, sources.plan.counted),
            "seconds": time.total_seconds if place.request.lengths is None else None,
            "samples": batch.global_batch,
            "host": memory.host_bytes_per_node,
            "hostLacks": max(0, fitting.host_shortfall_bytes(memory)),
        }
        if memory.fits:
            largest = max(largest, micro_batch)
    return made, largest, num_events * (len(made) + 1)


def _batch(place: Place, micro_batch: int) -> BatchPlan:
    request, shared_by = place.request, place.request.sequence_parallel or 1
    caps = (micro_batch,) * (place.cluster.world_size // shared_by)
    return BatchPlan.of(request.batch_samples, caps, request.global_tokens, sequence_parallel=shared_by).tightened()


def _accumulates(place: Place, steps: int) -> bool:
    return steps > 1 or place.request.lengths is not None


def _device(device: Device) -> dict[str, int]:
    return {
        "memory": device.memory_bytes,
        "context": device.context_bytes,
        "usable": device.usable_bytes,
        "threads": device.resident_threads,
    }


def _flags(strategy: Strategy) -> str:
    """Return the flags of `frugal plan` that pin a strategy. Layers that differ are chosen anew: no flag names them."""
    ratio = f":{strategy.offload_ratio:g}" if strategy.offload_ratio < 1 else ""
    words = ["--zero-stage", strategy.zero_stage, "--activation-checkpointing", strategy.activation_checkpointing]
    words += ["--loss", strategy.loss, "--offload", offload_level(strategy) + ratio]
    words += ["--mlp", strategy.mlp] if strategy.mlp != "plain" else []
    words += ["--sequence-parallel", strategy.sequence_parallel] if strategy.sequence_parallel > 1 else []
    return " ".join(map(str, words))
