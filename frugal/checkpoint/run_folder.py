"""Before a run starts: create and lock its folder, and check that every host has the memory and disk that it takes.

A host without memory ends ranks with SIGKILL, hours into a run and without a message; a full disk ends it at the first
checkpoint. What is free is known only here, on each node.
"""

import errno
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from frugal import file_errors, files, temporary
from frugal.checkpoint import in_use, manifest
from frugal.config.hardware.local_host import available_bytes
from frugal.config.run_settings import METRICS, RECORD, RunSettings
from frugal.deepspeed_adapter.json_config import plan_files
from frugal.distributed import env, first_failure, parent
from frugal.errors import CheckpointError, NothingFitsError, RequestError
from frugal.planning.memory import breakdown
from frugal.planning.plan import Plan
from frugal.units import format_bytes

START = ".start-"
"""The prefix of a folder of temporary files in the run's folder, one for each start."""

LEAVE_SECONDS = 120.0
"""Time for a rank 0 that is cut off to notice it (24 s), to wait for its launcher (15 s) and to end, three times."""

_FILES = (
    "plan.json", "ds_config.json", "trackers.json", "report.html", "arguments", "model", RECORD, METRICS,
    files.WRITTEN, in_use.MARK,
)  # fmt: skip
"""Names that a run replaces in its folder."""


def create(settings: RunSettings) -> RunSettings:
    """Create the run's folder, and return the settings of this start.

    Raises:
        RequestError: it holds another run, cannot be made, or what is written in it would go elsewhere.
    """
    newest = manifest.newest_checkpoint(settings.checkpoints)
    if newest is not None and env.is_restarted_by_torchrun():
        settings = replace(settings, resume=True)  # torchrun --max-restarts gives every start the same flags
    if newest is not None and not settings.resume:
        raise holds_a_run(settings.out, newest)
    make_folder(settings, settings.out)
    _refuse_links(settings.out, settings.checkpoints)
    return settings


def _refuse_links(out: Path, checkpoints: Path) -> None:
    """Refuse links in the place of what a run appends to, and another user's in the place of its folders.

    The run's folder itself may be reached through any link. A file that is replaced as a whole replaces a link, too.
    """
    with file_errors.failure(f"what is written to {out} would go elsewhere", out, file_errors.OR_ELSEWHERE):
        for appended in (out / METRICS, *(out / "logs").glob("rank_*.log")):
            if appended.is_symlink():
                raise OSError(errno.ELOOP, f"it is a symbolic link to {appended.readlink()}", str(appended))
        for folder in (out / "logs", checkpoints, out / "model"):
            files.refuse_foreign_link(folder)


def make_folder(settings: RunSettings, folder: Path) -> None:
    """Create `folder`, which is the run's or in it.

    Raises:
        RequestError: it cannot be made.
    """
    with _writing(settings):
        folder.mkdir(parents=True, exist_ok=True)


def holds_a_run(out: Path, newest: Path) -> RequestError:
    """Return the error of a new run in the folder of another one."""
    return RequestError(
        f"{out} holds a run already",
        because=f"its newest checkpoint is {newest.name}",
        hint="continue it with --resume, or choose another folder with --out",
    )


@contextmanager
def locked(settings: RunSettings) -> Iterator[None]:
    """Have the run's folder for this run only inside the `with` block, see `in_use`.

    A run that is restarted on other hosts waits for a rank 0 that is cut off and still ending.

    Raises:
        RequestError: another run writes there.
    """
    with ExitStack() as marked:
        end = time.monotonic() + LEAVE_SECONDS
        while True:
            try:
                with _writing(settings):
                    marked.enter_context(in_use.marked(settings.out))
                break
            except RequestError:
                if not (settings.resume and parent.is_over_ssh()) or time.monotonic() > end:
                    raise
                time.sleep(1)
        # Leftovers of killed starts are nobody's now.
        temporary.remove_abandoned(settings.out, START, but=first_failure.report_folder())
        files.remove_unfinished(settings.out, _FILES)
        files.remove_unfinished(settings.checkpoints, (manifest.POINTER, files.WRITTEN))
        yield


def record(plan: Plan, settings: RunSettings) -> None:
    """Write the plan, its print-out for DeepSpeed, and the settings to the run's folder.

    Raises:
        RequestError: it cannot be written; CheckpointError, if the run is to be resumed.
    """
    with _writing(settings):
        for name, text in (plan_files(plan) | {RECORD: settings.record()}).items():
            files.write_file(settings.out / name, text)


def _writing(settings: RunSettings) -> AbstractContextManager[None]:
    what, out = f"cannot write to {settings.out}", settings.out
    if settings.resume:
        return file_errors.failure(what, out, file_errors.THEN_RESUME, raises=CheckpointError)
    return file_errors.failure(what, out, file_errors.OR_ELSEWHERE)


def check_space(plan: Plan, settings: RunSettings) -> None:
    """Refuse a run that needs more than a host has free. Collective: all ranks raise, if one does.

    Raises:
        NothingFitsError: a host, by its name, lacks memory or disk.
        CheckpointError: a resumed run lacks disk only.
    """
    from frugal.distributed.exchange import gather

    name = socket.gethostname()
    names = gather(name, str)
    first = names.index(name) == env.rank()
    lacking = gather(_lacking(plan, settings, name, names.count(name)) if first else [], list[str])
    because = [text for texts in lacking for text in texts]
    if because:
        is_disk_full = settings.resume and all(_OF_DISK in text for text in because)
        raise (CheckpointError if is_disk_full else NothingFitsError)(
            "the run would not get through on what is free now",
            because=because,
            hint="free what lacks, or plan for it with --host-mem, and `disk=SIZE` in a hostfile; --out, --keep and "
            "--offload say what goes to which disk",
        )


def _lacking(plan: Plan, settings: RunSettings, name: str, num_ranks: int) -> list[str]:
    """Return a line for each resource of this host that is too small for its ranks."""
    ranks = "its rank" if num_ranks == 1 else f"its {num_ranks} ranks"
    lines = []
    needed, free = host_bytes(plan, num_ranks, has_rank_0=env.rank() == 0), available_bytes()
    if settings.async_save:
        needed += copied_bytes(plan, num_ranks, has_rank_0=env.rank() == 0)
        ranks += " and the copy of train.async-save"
    if needed > free:
        lines.append(f"{name} has {format_bytes(free)} of memory left, and {ranks} will take {format_bytes(needed)}")
    from frugal.deepspeed_adapter import kernels  # brings DeepSpeed along, which a parent of ranks does not need

    if kernels.uses_nvme(plan.strategy):
        needed = max(
            breakdown.nvme_bytes(plan.request, plan.strategy, plan.model, node, plan.cluster) // len(node.devices)
            for node in set(plan.cluster.nodes)
        )
        lines += _on_disk(name, Path(str(plan.strategy.nvme_path)).expanduser(), needed * num_ranks, "offloaded states")
    if env.rank() == 0:
        lines += _on_disk(name, settings.out, saved_bytes(plan, settings), "checkpoints and the trained model")
    return lines


def host_bytes(plan: Plan, num_ranks: int, *, has_rank_0: bool) -> int:
    """Return the bytes that the tensors of `num_ranks` ranks will take of their host, while loading or training.

    Bytes that a process takes without any are not counted: it has them already.
    """
    node, loading = plan.cluster.nodes[0], plan.memory.loading
    kind = node.devices[0].kind
    needed = breakdown.training_host_bytes(plan.memory, node, plan.cluster) // len(node.devices) * num_ranks
    if loading is not None:
        needed = max(needed, breakdown.ranks_loading_bytes(loading, kind, num_ranks, has_rank_0=has_rank_0))
    return max(0, needed - num_ranks * breakdown.PROCESS_BYTES[kind])


def copied_bytes(plan: Plan, num_ranks: int, *, has_rank_0: bool) -> int:
    """Return the bytes of a checkpoint written in the background that a host with `num_ranks` ranks holds.

    Each rank has its share of the optimizer's states. Only rank 0 has weights that are not partitioned, and all states
    under ZeRO-0.
    """
    total, stage = breakdown.checkpoint_bytes(plan.request, plan.strategy, plan.model), plan.strategy.zero_stage
    if stage == 0:
        return total * has_rank_0
    weights = plan.request.element_bytes * breakdown.saved_parameters(plan.request, plan.model) * (stage < 3)
    return (total - weights) * num_ranks // plan.batch.world_size + weights * has_rank_0


def saved_bytes(plan: Plan, settings: RunSettings) -> int:
    """Return the bytes that the run adds to its folder: the checkpoints that it keeps, one being written, the model.

    Left out: the best checkpoint, if it is not among the newest. Only checkpoints that this run wrote make room for
    later ones, see `files.written`.
    """
    existing = sum(path.name in files.written(path.parent) for path in manifest.checkpoints_in(settings.checkpoints))
    copied = settings.mirror is not None  # one more is kept while a slow storage takes it
    copies = max(1, (settings.keep + 1 + copied if settings.save_every else 1) - existing)
    weights = plan.request.element_bytes * breakdown.saved_parameters(plan.request, plan.model)
    return copies * breakdown.checkpoint_bytes(plan.request, plan.strategy, plan.model) + weights


_OF_DISK = "free on the disk of"


def _on_disk(name: str, folder: Path, needed: int, what: str) -> list[str]:
    while not folder.exists():  # it will be made
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return []
    return [f"{name} has {format_bytes(free)} {_OF_DISK} {folder}, and {what} will take {format_bytes(needed)}"]
