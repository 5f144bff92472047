"""The program of every rank of a training run.

Started by `frugal train`, by DeepSpeed's launcher, torchrun, OpenMPI, MPICH or SLURM, always with a plan:

    deepspeed --num_gpus 2 --module frugal.engine.run --plan run/plan.json --data corpus.jsonl --steps 100
    torchrun --nproc-per-node 2 -m frugal.engine.run --plan run/plan.json --data corpus.jsonl --steps 100
    mpirun -x MASTER_ADDR -n 2 python -m frugal.engine.run --plan run/plan.json --data corpus.jsonl --steps 100
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from frugal.checkpoint import manifest
from frugal.config.run_settings import RunSettings
from frugal.config.schema import parse
from frugal.config.setting import build, settings_of
from frugal.distributed import first_failure, process_group, rank_logs, stop
from frugal.errors import FrugalError
from frugal.imports import collected_seldom
from frugal.planning.plan import Plan


def run(plan: Plan, settings: RunSettings) -> None:
    """Train as `plan` and `settings` say, on this rank. Collective over all ranks of the run.

    Raises:
        FrugalError: the plan, the data, the folder or the memory does not allow it.
    """
    rank_logs.guard_console()
    with stop.heed_stop_signals(settings.grace, partial(_end_without_saving, settings.checkpoints)):
        _run(plan, settings)
        if stop.requested() is not None:
            stop.ignore()


def _end_without_saving(checkpoints: Path, what: str, why: str, code: int) -> None:
    """End this rank, which was asked to stop and is not to be waited for."""
    newest = manifest.newest_checkpoint(checkpoints)
    kept = f"the last good checkpoint is {newest.name}" if newest else "there is no checkpoint"
    hint = "continue from it with --resume; --set train.grace=SECONDS says how long a step and its checkpoint may take"
    first_failure.end_rank(FrugalError(what, because=[why, kept], hint=hint if newest else None), code)


def _run(plan: Plan, settings: RunSettings) -> None:
    with collected_seldom():
        device = process_group.join(plan, settings.out)
    import torch.distributed as dist

    alone = dist.get_world_size() == 1
    if not alone:
        from frugal.distributed.peer_watch import watch_peers

        peer_watch = watch_peers(first_failure.end_rank)
    try:
        with collected_seldom():
            from frugal.engine import training
        sys.path.append("")  # a user's own files are found, behind libraries
        training.train(plan, settings, device)
        dist.barrier()
        first_failure.report_done()
        if not alone:
            peer_watch.close()
    except BaseException:
        if alone:  # otherwise the process ends at once: the others may be waiting for it
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def command(words: Sequence[str]) -> None:
    """Train as a plan says, on one rank of a launcher: `--plan plan.json` and the flags of a run.

    Raises: as `run`; RequestError also for words that say something else.
    """
    given = parse(words, {"plan": Path}, settings_of(RunSettings), needed=["plan"])
    run(Plan.read(given.pop("plan")), build(RunSettings, given))


def main() -> None:
    """The rank's whole life."""
    first_failure.run_command(command)


if __name__ == "__main__":
    main()
