"""Whether the hosts have the memory and the disk that a run takes, asked before it takes them.

A host without memory ends ranks with SIGKILL, hours into a run and without a word; a full disk ends it at the first
checkpoint. What is free is known only here, on each node itself.
"""

import os
import shutil
import socket
from pathlib import Path

import torch.distributed as dist

from frugal.errors import NothingFitsError
from frugal.planning import disk, host
from frugal.planning.plan import Plan
from frugal.training import manifest, nvme
from frugal.training.circumstances import available_bytes
from frugal.training.settings import Settings
from frugal.units import format_bytes


def check(plan: Plan, asked: Settings) -> None:
    """Refuse a run that some host has no room for. Collective: all ranks raise, if one does.

    Raises:
        NothingFitsError: a host, by its name, lacks memory, or room on a disk.
    """
    name = socket.gethostname()
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, name)
    lacking: list[list[str]] = [[]] * len(names)
    first = names.index(name) == dist.get_rank()
    dist.all_gather_object(lacking, _lacking(plan, asked, name, names.count(name)) if first else [])
    found = [text for texts in lacking for text in texts]
    if found:
        raise NothingFitsError(
            "the run would not get through on what is free now",
            because=found,
            hint="free what lacks, or plan for it with --host-mem and --host-disk; --out, --keep and --nvme-path say "
            "what goes to which disk",
        )


def _lacking(plan: Plan, asked: Settings, name: str, num_ranks: int) -> list[str]:
    """What this host lacks for its ranks, a line each."""
    ranks = "its rank" if num_ranks == 1 else f"its {num_ranks} ranks"
    found = []
    needed, free = host_bytes(plan) * num_ranks, available_bytes()
    if asked.async_save:
        needed += copied_bytes(plan, num_ranks, has_rank_0=os.environ.get("RANK", "0") == "0")
        ranks += " and the copy of --async-save"
    if needed > free:
        found.append(f"{name} has {format_bytes(free)} of memory left, and {ranks} will take {format_bytes(needed)}")
    if nvme.is_used(plan):
        needed = max(
            disk.nvme_bytes(plan.request, plan.strategy, plan.model, node, plan.cluster) // len(node.devices)
            for node in set(plan.cluster.nodes)
        )
        found += _on_disk(name, Path(str(plan.strategy.nvme_path)).expanduser(), needed * num_ranks, "offloaded states")
    if os.environ.get("RANK", "0") == "0":
        found += _on_disk(name, asked.out, saved_bytes(plan, asked), "checkpoints and the trained model")
    return found


def host_bytes(plan: Plan) -> int:
    """What the tensors of one rank will take of its host; what a process takes without any, it has taken already."""
    node = plan.cluster.nodes[0]
    whole = host.needed_bytes(plan.memory, node, plan.cluster) // len(node.devices)
    return max(0, whole - host.PROCESS_BYTES[node.devices[0].kind])


def copied_bytes(plan: Plan, num_ranks: int, *, has_rank_0: bool) -> int:
    """What a host with so many ranks holds of a checkpoint that is written in the background.

    Each rank has its share of the optimizer's states. Rank 0 alone has the weights, where they are not partitioned, and
    all states under ZeRO-0.
    """
    whole, stage = disk.checkpoint_bytes(plan.request, plan.strategy, plan.model), plan.strategy.zero_stage
    if stage == 0:
        return whole * has_rank_0
    weights = _element(plan) * plan.model.parameters * (stage < 3)
    return (whole - weights) * num_ranks // plan.batch.world_size + weights * has_rank_0


def saved_bytes(plan: Plan, asked: Settings) -> int:
    """What the run will add to its folder: as many checkpoints as are kept and one in the making, and the model.

    Left out: the best checkpoint, where it is not among the newest.
    """
    there = len(manifest.candidates(asked.checkpoints))
    copies = max(1, (asked.keep + 1 if asked.save_every else 1) - there)
    weights = _element(plan) * plan.model.parameters
    return copies * disk.checkpoint_bytes(plan.request, plan.strategy, plan.model) + weights


def _element(plan: Plan) -> int:
    """Bytes of a weight as it is trained."""
    return 4 if plan.request.precision == "fp32" else 2


def _on_disk(name: str, folder: Path, needed: int, what: str) -> list[str]:
    while not folder.exists():  # it will be made
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return []
    return [
        f"{name} has {format_bytes(free)} free on the disk of {folder}, and {what} will take {format_bytes(needed)}"
    ]
