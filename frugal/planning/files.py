"""A plan on disk: `plan.json`, which is everything, and `ds_config.json`, its print-out for DeepSpeed."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from frugal.errors import RequestError
from frugal.planning.ds_config import deepspeed_config
from frugal.planning.plan import Plan


def write_plan(plan: Plan, folder: Path) -> tuple[Path, Path]:
    """Write both files, each whole or not at all; their paths. Makes the folder.

    Raises:
        RequestError: they cannot be written: no space left, no permission.
    """
    config = json.dumps(deepspeed_config(plan), indent=2).encode() + b"\n"
    plan_path, config_path = write_files(folder, {"plan.json": plan.to_json(), "ds_config.json": config})
    return plan_path, config_path


def write_files(folder: Path, texts: Mapping[str, bytes]) -> tuple[Path, ...]:
    """Write files by name, each whole or not at all; their paths. Makes the folder.

    Raises:
        RequestError: as `write_plan`.
    """
    written = tuple(folder / name for name in texts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(written, texts.values(), strict=True):
            _write(path, text)
    except OSError as error:
        raise RequestError(
            f"cannot write {error.filename or folder}",
            because=(error.strerror or str(error)).lower(),
            hint="choose another folder with -o",
        ) from None
    return written


def _write(path: Path, text: bytes) -> None:
    """Aside, to disk, then into place, so that `path` never holds half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        error.filename = str(path)
        raise
