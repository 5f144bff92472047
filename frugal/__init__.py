"""Train any batch on the GPUs you have, with memory that comes out as predicted.

    plan = frugal.plan(model="gpt2", gpus=4, mem="12G", global_batch=512)
    engine = frugal.initialize(model, plan, objective)

Names are imported when they are first used: `import frugal` brings in neither torch nor DeepSpeed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frugal.distributed.stop import heed_stop_signals
    from frugal.dryrun.loop.run import dry_run
    from frugal.dryrun.planner import plan
    from frugal.errors import FrugalError
    from frugal.planning.plan import Plan
    from frugal.training.engine import Engine, initialize

    __version__: str

__all__ = ["Engine", "FrugalError", "Plan", "__version__", "dry_run", "heed_stop_signals", "initialize", "plan"]

_HOMES = {
    "Engine": "frugal.training.engine",
    "FrugalError": "frugal.errors",
    "Plan": "frugal.planning.plan",
    "dry_run": "frugal.dryrun.loop.run",
    "heed_stop_signals": "frugal.distributed.stop",
    "initialize": "frugal.training.engine",
    "plan": "frugal.dryrun.planner",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("frugal-trainer")
    if name not in _HOMES:
        raise AttributeError(f"module 'frugal' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
