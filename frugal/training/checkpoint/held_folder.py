"""The run's folder, held open, so that a run notices when it is moved or deleted under it.

A run that goes by the folder's name alone would make a new folder of that name at its next save, in which the earlier
checkpoints are missing, or save into another run's. Held open, a folder that was moved still tells where it is, and the
run goes on there: its files are all together, and nothing is lost. Of one that was deleted nothing is left but what the
ranks have in memory. `frugal.training.checkpoint.saving` saves that once more, into a new folder, and the run ends.
"""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from frugal.config.run_settings import RunSettings

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger("frugal")


class HeldFolder:
    """Where a run's folder is by now, the same on all ranks.

    `descriptor`: of the open folder, on rank 0; None on others, and where nobody looks whether it is still there.
    `settings`: those of the run, whose `out` is where the folder was when ranks last asked.
    """

    def __init__(self, settings: RunSettings, descriptor: int | None = None) -> None:
        self.settings = replace(settings, out=settings.out.absolute())
        self._descriptor = descriptor
        self._status = None if descriptor is None else os.fstat(descriptor)  # network disks may not say it later

    def follow(self, votes: "dist.ProcessGroup | None") -> bool:
        """Ask rank 0 where the folder is: whether it is anywhere. Collective."""
        from frugal.distributed.exchange import from_rank_0  # brings torch along, which a parent of ranks does not need

        before = self.settings.out
        now = from_rank_0(os.fsencode(self.look() or b""), bytes, votes)
        if now and now != os.fsencode(before):
            self.settings = replace(self.settings, out=Path(os.fsdecode(now)))
            if self._descriptor is not None:
                logger.warning(
                    "the run's folder was moved: %s is now %s, where the run goes on", before, self.settings.out
                )
        return bool(now)

    def replace(self, out: Path) -> None:
        """Go on in another folder, in place of one that is gone."""
        self.settings, self._descriptor = replace(self.settings, out=out), None

    @property
    def is_deleted(self) -> bool:
        """Whether this rank knows that it was deleted; quickly asked."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0

    def look(self) -> Path | None:
        """Where it is; None if it was deleted, or no name leads to it any more."""
        out = self.settings.out
        if self._descriptor is None or self._is_at(out):
            return out
        now = Path(f"/proc/self/fd/{self._descriptor}").readlink()
        return now if self._is_at(now) else None

    def _is_at(self, path: Path) -> bool:
        try:
            return self._status is not None and os.path.samestat(self._status, path.stat())
        except OSError:
            return False
