"""Train any global batch on the GPUs you have, with predictable memory.

    plan = frugal.plan(model="gpt2", gpus=4, mem="12G", global_batch=512)
    engine = frugal.initialize(model, plan, frugal.CausalLM())

Names are imported when they are first used: `import frugal` imports neither torch nor DeepSpeed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frugal.distributed.stop import heed_stop_signals
    from frugal.dryrun.planner import plan
    from frugal.engine.engine import Engine, initialize
    from frugal.errors import (
        CheckpointError,
        FrugalError,
        NothingFitsError,
        NumbersError,
        OutOfMemoryError,
        PlanMismatchError,
        RequestError,
    )
    from frugal.integrations.transformers import PlannedMixin, PlannedTrainer, training_arguments
    from frugal.models.objectives import CausalLM, MeanLoss, Objective, SummedLoss
    from frugal.planning.plan import Plan
    from frugal.tools.own_loop.run import dry_run

    __version__: str

_NAMES = {
    "frugal.distributed.stop": ("heed_stop_signals",),
    "frugal.tools.own_loop.run": ("dry_run",),
    "frugal.dryrun.planner": ("plan",),
    "frugal.errors": (
        "CheckpointError", "FrugalError", "NothingFitsError", "NumbersError", "OutOfMemoryError", "PlanMismatchError",
        "RequestError",
    ),
    "frugal.integrations.transformers": ("PlannedMixin", "PlannedTrainer", "training_arguments"),
    "frugal.planning.plan": ("Plan",),
    "frugal.engine.engine": ("Engine", "initialize"),
    "frugal.models.objectives": ("CausalLM", "MeanLoss", "Objective", "SummedLoss"),
}  # fmt: skip
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "CausalLM",
    "CheckpointError",
    "Engine",
    "FrugalError",
    "MeanLoss",
    "NothingFitsError",
    "NumbersError",
    "Objective",
    "OutOfMemoryError",
    "Plan",
    "PlanMismatchError",
    "PlannedMixin",
    "PlannedTrainer",
    "RequestError",
    "SummedLoss",
    "__version__",
    "dry_run",
    "heed_stop_signals",
    "initialize",
    "plan",
    "training_arguments",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("frugal-trainer")
    if name not in _HOMES:
        raise AttributeError(f"module 'frugal' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
