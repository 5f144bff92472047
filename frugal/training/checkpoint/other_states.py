"""A checkpoint whose files have their checksums, and not what they are read for: the error that names it.

What is asked for and not there, DeepSpeed, torch and `restore` find in the middle of reading, each with its own error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from frugal.distributed.first_failure import lost_connection
from frugal.errors import CheckpointError
from frugal.training.oom_limits import is_out_of_memory

_ERRORS = (LookupError, TypeError, AttributeError, AssertionError, ValueError, RuntimeError)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Inside, the checkpoint `path` is read.

    Raises:
        CheckpointError: its files do not hold what was asked for.
    """
    try:
        yield
    except _ERRORS as error:
        if not _is_of_content(error):
            raise
        raise CheckpointError(
            f"cannot continue from {path}: its files are whole, and do not hold the states of this run",
            because=f"{type(error).__name__}: {error}".splitlines()[0],
            hint=f"move {path.name} away to continue from the checkpoint before it, or start again with another --out",
        ) from error


def _is_of_content(error: Exception) -> bool:
    """Whether an error of reading is about what is read. Classes below RuntimeError are of collectives and of CUDA."""
    if not isinstance(error, RuntimeError):
        return True
    return type(error) is RuntimeError and not (lost_connection(error) or is_out_of_memory(error))
