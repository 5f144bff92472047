"""The calibrations of this machine: where they are kept, and which one a request is planned with. No torch here."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import platformdirs

from frugal.planning.calibration import Calibration, find, read_all
from frugal.training.circumstances import cpu_name, cuda_driver


def folder() -> Path:
    """In the user's configuration folder, because a calibration is dear and nothing makes it again by itself."""
    return Path(platformdirs.user_config_dir("frugal")) / "calibration"


def torch_version() -> str:
    """Of the torch that is installed; empty without one."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def chosen(settings: Mapping[str, Any], gpu_name: str | None = None) -> tuple[Calibration | None, list[str]]:
    """The calibration for a cluster of these settings, and notes about damaged ones.

    `gpu_name` is what the driver calls the GPUs found here; without it the card that `settings` name is looked up.
    """
    if settings.get("calibration") is False:
        return None, []
    known, notes = read_all(folder())
    if settings.get("device", "cuda") == "cpu":
        found = find(known, kind="cpu", torch=torch_version(), device=cpu_name(), driver="")
    elif gpu_name is not None:
        found = find(known, kind="cuda", torch=torch_version(), device=gpu_name, driver=cuda_driver())
    else:
        found = find(known, kind="cuda", torch=torch_version(), card=settings.get("gpu"))
    return found, notes
