"""A copy of a run's checkpoints and metrics in any storage that fsspec knows, such as S3: for machines that vanish.

A thread of rank 0 copies beside training what lies in the run's folder, which all ranks share:

    s3://bucket/run/
      plan.json, ds_config.json, train.json, metrics.jsonl
      mirror.json
      checkpoints/latest
      checkpoints/step-000100/manifest.json, ...

A checkpoint's manifest comes last, once the storage lists all its files with their sizes. Whatever is cut off at any
point leaves a folder without a manifest, which nobody reads and a later copy completes. Older checkpoints are removed
there when they were removed here, after a newer one is whole. A failure is said once, and tried again until the run
ends; training goes on. What is fetched is checked against the SHA-256 in its manifest before it gets its name.
"""

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from frugal import files, storages
from frugal.checkpoint import manifest
from frugal.checkpoint.manifest import MANIFEST, POINTER
from frugal.checkpoint.progress import read_progress
from frugal.config.run_settings import CHECKPOINTS, METRICS, RECORD
from frugal.distributed import rank_logs, stop
from frugal.errors import CheckpointError, first_line

_OWNER = "mirror.json"
"""A random name of the run, here and there: who has another one leaves the other run's checkpoints alone."""

_FILES = (_OWNER, "plan.json", "ds_config.json", RECORD, METRICS)
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "hf")
"""Storages without folders: to make one there may create a bucket."""

RETRY_SECONDS = (5.0, 300.0)
"""The first wait after a failure, which doubles up to the second."""

PROBE_SECONDS = 5.0
"""Time for the first answer of a storage, before a run is planned."""

QUIET_SECONDS = 3.0
"""Time for the last copy before it is said that the run waits for it."""

ENDING_SECONDS = 60.0
"""Time for what is left to copy when a run has failed; one that is done or told to stop has its grace."""


class _Storage:
    """The folder of a run in a storage."""

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it has no type hints

        self.fs, root = url_to_fs(address)
        self.root = root.rstrip("/")
        self._has_folders = urlsplit(address).scheme not in _OBJECT_STORES

    def probe(self) -> None:
        """Raise what the storage's library raises where nothing can be kept: no server, no bucket, no folder."""
        look = partial(self.fs.makedirs, exist_ok=True) if self._has_folders else self.fs.ls
        look(self.root if self._has_folders else self.root.partition("/")[0])

    def sizes(self, *names: str) -> dict[str, int]:
        """Return the bytes of what is in a folder, by name; 0 for folders."""
        self.fs.invalidate_cache()
        listed = []
        with suppress(FileNotFoundError):
            listed = self.fs.ls(self.path(*names), detail=True)
        return {each["name"].rstrip("/").rpartition("/")[2]: int(each["size"] or 0) for each in listed}

    def read(self, *names: str) -> bytes | None:
        """Return the content of a file; None if there is none."""
        with suppress(FileNotFoundError):
            return bytes(self.fs.cat_file(self.path(*names)))
        return None

    def put(self, content: Path | bytes, *names: str) -> None:
        """Write a file."""
        if self._has_folders:
            self.fs.makedirs(self.path(*names[:-1]), exist_ok=True)
        if isinstance(content, bytes):
            self.fs.pipe_file(self.path(*names), content)
        else:
            self.fs.put_file(str(content), self.path(*names))

    def remove_checkpoint(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""
        for path in (self.path(CHECKPOINTS, name, MANIFEST), self.path(CHECKPOINTS, name)):
            with suppress(FileNotFoundError):
                self.fs.rm(path, recursive=True)

    def path(self, *names: str) -> str:
        """Return the storage's own name of a file."""
        return "/".join((self.root, *names))


class Mirror:
    """The copying of one run, on a thread."""

    def __init__(self, address: str, out: Path) -> None:
        self._address, self._out, self._checkpoints = address, out.absolute(), out / CHECKPOINTS
        self._links = self._out / ".mirror"
        self._whole: dict[str, bytes] = {}  # manifests of the checkpoints that are whole there
        self._sent: set[tuple[str, str]] = set()  # names and SHA-256 of files of checkpoints that are not
        self._why, self._is_ending, self._is_refused = "", False, False
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Copy what is new, on the thread."""
        self._due.set()

    def close(self, seconds: float) -> None:
        """Copy what is left, for `seconds` at most; say what could not be."""
        self._is_ending = True
        stop.under_way = f"the copy to the mirror {self._address}"
        self._due.set()
        self._thread.join(first := min(seconds, QUIET_SECONDS))
        if self._thread.is_alive() and seconds > first:
            rank_logs.to_console(f"copying to the mirror {self._address}, for at most {seconds - first:.0f} s more")
            self._thread.join(seconds - first)
        newest = manifest.newest_checkpoint(self._checkpoints)
        if self._thread.is_alive() and not self._is_refused:
            lacks = f" lacks {newest.name}" if newest is not None and newest.name not in self._whole else ""
            why = self._why or f"it took longer than {seconds:.0f} s"
            rank_logs.to_console(f"warning: the mirror {self._address} is not complete,{lacks} ({why})")
        self._is_refused = True  # no later attempt
        self._due.set()
        shutil.rmtree(self._links, ignore_errors=True)

    def _run(self) -> None:
        shutil.rmtree(self._links, ignore_errors=True)  # of a start that was killed
        wait = RETRY_SECONDS[0]
        while not self._is_refused:
            self._due.wait(wait if self._why else None)
            self._due.clear()
            is_last = self._is_ending
            try:
                self._copy()
            except Exception as error:  # a storage's library may raise anything
                why = storages.explained(error)
                if why != self._why:
                    rank_logs.to_console(
                        f"warning: the mirror {self._address} cannot be written ({why}); training goes on"
                    )
                self._why = why
                wait = RETRY_SECONDS[0] if is_last else min(2 * wait, RETRY_SECONDS[1])
                continue
            if self._why:
                rank_logs.to_console(f"the mirror {self._address} is written again")
            self._why, wait = "", RETRY_SECONDS[0]
            if is_last:
                return

    def _copy(self) -> None:
        storage = _Storage(self._address)
        there = storage.sizes(CHECKPOINTS)
        if not self._owns(storage, there):
            rank_logs.to_console(f"warning: the mirror {self._address} holds another run: nothing is copied to it")
            self._is_refused = True
            return
        here = [path for path in manifest.checkpoints_in(self._checkpoints) if path.suffix != ".old"]
        for path in here:
            try:
                self._copy_checkpoint(storage, path)
            except (FileNotFoundError, ValueError):  # the latter of a manifest that cannot be read
                if (path / MANIFEST).exists():  # else it was removed meanwhile
                    raise
        names = {path.name for path in here}
        if here and here[0].name in self._whole:
            storage.put(here[0].name.encode() + b"\n", CHECKPOINTS, POINTER)
        for name in _FILES[1:]:
            if (self._out / name).exists():
                storage.put(self._out / name, name)
        if names & self._whole.keys():
            for name in _steps(there) - names:
                storage.remove_checkpoint(name)
                self._whole.pop(name, None)

    def _owns(self, storage: _Storage, there: dict[str, int]) -> bool:
        """Return whether what is there is this run's; a storage that has no run becomes it."""
        if not (self._out / _OWNER).exists():
            files.write_file(self._out / _OWNER, secrets.token_hex(16).encode() + b"\n")
        own, theirs = files.read_regular(self._out / _OWNER), storage.read(_OWNER) or b""
        is_ours = own.startswith(theirs) and bool(theirs or not _steps(there))  # it may have been cut off
        if is_ours and theirs != own:
            storage.put(own, _OWNER)
        return is_ours

    def _copy_checkpoint(self, storage: _Storage, path: Path) -> None:
        listed = files.read_regular(path / MANIFEST, manifest.MOST_BYTES)
        if self._whole.get(path.name) == listed:
            return
        there = storage.read(CHECKPOINTS, path.name, MANIFEST)
        if there != listed:
            if there is not None:
                storage.remove_checkpoint(path.name)
            with self._held(path) as held:
                listed_files = manifest.read(held).files
                for name, file in listed_files.items():
                    if (path.name + name, file.sha256) not in self._sent:
                        storage.put(held / name, CHECKPOINTS, path.name, name)
                        self._sent.add((path.name + name, file.sha256))
            sizes = storage.sizes(CHECKPOINTS, path.name)
            for name, file in listed_files.items():
                if sizes.get(name) != file.num_bytes:
                    self._sent.clear()
                    raise OSError(f"{path.name}/{name} has {sizes.get(name, 0)} of {file.num_bytes} bytes there")
            storage.put(listed, CHECKPOINTS, path.name, MANIFEST)
        self._whole[path.name] = listed
        self._sent.clear()

    @contextmanager
    def _held(self, path: Path) -> Iterator[Path]:
        """Give a checkpoint a second name, so that a slow storage gets all of one that is removed meanwhile."""
        links = held = self._links / path.name
        shutil.rmtree(links, ignore_errors=True)
        try:
            links.mkdir(parents=True)
            for file in path.iterdir():
                os.link(file, links / file.name)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            held = path
        try:
            yield held
        finally:
            shutil.rmtree(links, ignore_errors=True)


@contextmanager
def beside(address: str | None, out: Path, grace: float) -> Iterator[Callable[[], None]]:
    """Copy the folder of a run while the `with` block runs; call the result after each checkpoint.

    `address`: of the storage; None: nothing is copied. `grace`: seconds for what is left at the end.
    """
    if address is None:
        yield lambda: None
        return
    mirror = Mirror(address, out)
    try:
        yield mirror.wake
    except BaseException:
        mirror.close(min(ENDING_SECONDS, grace))
        raise
    mirror.close(grace)


def warn_if_unreachable(address: str) -> None:
    """Say if a storage cannot be used now. It may answer later, so a run is not refused for it."""
    try:
        ThreadPool(1).apply_async(_Storage(address).probe).get(PROBE_SECONDS)
    except Exception as error:  # a storage's library may raise anything
        rank_logs.to_console(
            f"warning: the mirror {address} cannot be used now ({storages.explained(error)}; it has "
            f"{PROBE_SECONDS:.0f} s to answer): the run goes on, and tries it after each checkpoint"
        )


def fetch_if_empty(address: str | None, out: Path) -> None:
    """Bring the newest whole checkpoint of a run to resume, and its best one, into a folder `out` that has none.

    `address`: of the storage; None: nothing is brought.

    Raises:
        CheckpointError: the storage cannot be read.
    """
    if address is None or manifest.newest_checkpoint(out / CHECKPOINTS) is not None:
        return
    storages.check("--mirror", address)
    try:
        rank_logs.to_console(f"fetching the newest checkpoint from {address}")
        _fetch(_Storage(address), out)
    except Exception as error:  # a storage's library may raise anything
        raise CheckpointError(
            f"cannot fetch a checkpoint from {address}", because=storages.explained(error),
            hint="try again, or start without --resume",
        ) from None  # fmt: skip


def _fetch(storage: _Storage, out: Path) -> None:
    checkpoints = out / CHECKPOINTS
    there = _steps(storage.sizes(CHECKPOINTS))
    latest = (storage.read(CHECKPOINTS, POINTER) or b"").decode(errors="replace").strip()
    for name in sorted(there, key=lambda name: (name == latest, manifest.step_of(name)), reverse=True):
        if (why := _fetch_checkpoint(storage, name, checkpoints)) is None:
            break
        rank_logs.to_console(f"refused a checkpoint of the mirror: {why}")
    else:
        return
    best = read_progress(checkpoints / name).best
    if best is not None and (best_name := f"step-{best.step:06d}") in there - {name}:
        _fetch_checkpoint(storage, best_name, checkpoints)
    files.write_file(checkpoints / POINTER, name.encode() + b"\n")
    for each in _FILES:
        if not (out / each).exists() and (content := storage.read(each)) is not None:
            files.write_file(out / each, content)


def _fetch_checkpoint(storage: _Storage, name: str, folder: Path) -> str | None:
    """Bring a checkpoint into `folder`; return why it is not whole."""
    aside = files.unfinished(folder / name)
    aside.mkdir(parents=True)
    try:
        files.write_file(aside / MANIFEST, storage.read(CHECKPOINTS, name, MANIFEST) or b"")
        made_by = manifest.read(aside)
        for each in made_by.files:
            storage.fs.get_file(storage.path(CHECKPOINTS, name, each), str(aside / each))
        if (damage := manifest.first_damage(aside, made_by, 0, 1)) is not None:
            return damage
        files.flush_all(aside)
        files.replace_own_folder(aside, folder / name)
    except (FileNotFoundError, ValueError, msgspec.DecodeError) as error:
        return f"{name}: {first_line(error)}"
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return None


def _steps(names: dict[str, int]) -> set[str]:
    return {name for name in names if manifest.step_of(name) is not None}
