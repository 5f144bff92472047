"""Profiles on disk. The key is a digest of everything a dry run depends on, so nothing in the cache goes stale.

frugal's own sources are part of it, 140 files in 3 ms. Entries that are unused for long are removed, so that the
profiles of old versions do not stay. A file begins with the SHA-256 of the rest, as a digit that has changed is another
number.
"""

import functools
import hashlib
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import platformdirs

from frugal import files
from frugal.config.hardware.local_host import fused_kernels, versions
from frugal.config.request import Request
from frugal.errors import logger
from frugal.units import MIB

T = TypeVar("T")

_ROOT = Path(__file__).parents[1]
LIMIT_BYTES = 512 * MIB
"""The size limit of all profiles; see `frugal.files`. A plan of a large model takes some MiB."""


class Cache:
    """A folder of JSON files; without a folder nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls) -> "Cache":
        """Return the cache in the user's cache folder, if there is one."""
        try:
            return cls(Path(platformdirs.user_cache_dir("frugal")) / "profiles")
        except RuntimeError as error:  # a user without a home
            _say_once(f"plans are not kept: {error}")
            return cls(None)

    def read(self, key: str, kind: type[T]) -> T | None:
        """Return the value under `key`; None if there is none, or if the file is damaged."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}.json"
        try:
            checksum, _, data = files.read_regular(path).partition(b"\n")
            if checksum != _checksum(data):
                return None
            value = msgspec.json.decode(data, type=kind)
            files.touch(path)
            return value
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, AssertionError):
            return None

    def read_or_make(self, key: str, kind: type[T], make: Callable[[], T]) -> T:
        """Return the value under `key`; where there is none, what `make` returns, which is kept."""
        value = self.read(key, kind)
        if value is None:
            value = make()
            self.write(key, value)
        return value

    def has(self, key: str) -> bool:
        """Return whether something was written under `key`."""
        return self.folder is not None and (self.folder / f"{key}.json").is_file()

    def write(self, key: str, value: Any) -> None:
        """Keep `value` under `key`. A failure is reported once, and is no error: the cache only saves time."""
        if self.folder is None:
            return
        data = msgspec.json.encode(value)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.write_file(self.folder / f"{key}.json", b"%b\n%b" % (_checksum(data), data), durable=False)
            files.prune(self.folder, LIMIT_BYTES)
        except OSError as error:
            _say_once(f"plans are not kept in {self.folder}: {error.strerror}")


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)


def digest(*parts: Any) -> str:
    """Return the SHA-256 of `parts` as JSON, hexadecimal."""
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def model_key(request: Request) -> Any:
    """Return everything that a dry run of the request's model depends on, found without torch."""
    return [request.seq_len, *facts_key(request)]


def facts_key(request: Request) -> Any:
    """Return everything that the model's facts depend on; it is the same for samples of any length."""
    definition = [request.model, request.task, request.lora, request.quantize, _definition(request.model)]
    return [*definition, request.pack and request.document_tokens, *_versions()]


@functools.cache
def presets() -> dict[str, Any]:
    """Return all presets by name."""
    return tomllib.loads((_ROOT / "models" / "presets.toml").read_text())


@functools.cache
def _versions() -> tuple[str, ...]:
    """Return the versions that dry runs and plans depend on; for frugal also a digest of its sources."""
    sources = hashlib.sha256()
    for path in sorted(_ROOT.rglob("*.py")):
        sources.update(path.read_bytes())
    return (*(f"{name} {version}" for name, version in versions().items()), fused_kernels(), sources.hexdigest())


def _definition(model: str) -> str | None:
    """Return a digest of the model's definition: its preset, its config.json and weights, its factory's source file.

    None for a transformers model type or a hub name, whose definition comes with the versions or with the name.
    """
    if model in presets():
        return digest(presets()[model])
    file: Path | None = Path(model).expanduser()
    weights: list[tuple[str, int]] = []
    if file is not None and file.is_dir():
        weights = sorted((each.name, each.stat().st_size) for each in file.iterdir() if each.suffix in _WEIGHTS)
        file /= "config.json"
    elif ":" in model and file is not None and not file.exists():
        file = _source_file(model.rpartition(":")[0])
    if file is None or not file.is_file():
        return None
    contents = hashlib.sha256(file.read_bytes()).hexdigest()
    return digest(contents, weights) if weights else contents


_WEIGHTS = {".safetensors", ".bin"}


def _source_file(module: str) -> Path | None:
    """Return the source of `package.module` or `path/to/file.py`, without importing it."""
    if module.endswith((".py", ".cloudpickle")):
        return Path(module).expanduser()
    relative = Path(*module.split("."))
    for folder in ["", *sys.path]:
        for candidate in (Path(folder) / relative.with_suffix(".py"), Path(folder) / relative / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None
