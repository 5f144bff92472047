"""Atomic writes: whoever reads a name finds all of its content or nothing, whenever the writer was killed.

Content is written under a temporary name in the same folder and renamed when it is complete. Durable writes are also
flushed (fsync), the content before the rename and the folder's list of names after it, so that they survive a power
failure. What can be made again, such as a cache, need not be durable.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace the content of `path`, or create it.

    Raises:
        OSError: it cannot be written; `path` is what it was, and the error names it.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        if durable:
            flush(temporary)
        temporary.replace(path)
        if durable:
            flush(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def replace_folder(temporary: Path, final: Path) -> None:
    """Give a complete folder, whose files are flushed, its final name; durable.

    A folder of that name is kept as `NAME.old` until the new one is in place.
    """
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    temporary.rename(final)
    flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to fill, which is renamed to `final` at the end of the block, and removed if the block fails.

    Not durable. Where another process was first with a folder of that name, its folder stays.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{final.name}.", dir=final.parent))
    try:
        yield temporary
        try:
            temporary.rename(final)
        except OSError:
            if not final.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
