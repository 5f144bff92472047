"""The errors a user can cause, each with its exit code.

    FrugalError
    ├── RequestError         2    the request is wrong: a flag, a file, the data, a number
    ├── NothingFitsError     3    no strategy fits into the memory there is
    ├── PlanMismatchError    4    the plan was made for another run: world size, model, versions
    ├── OutOfMemoryError     5    out of memory beyond recovery
    ├── CheckpointError      6    a checkpoint cannot be read or written
    └── NumbersError         7    the loss or the gradient is not a number

An interrupted run exits with 130. Any other exception is a bug of ours and keeps its traceback. What is no error, and
the user should know, is logged with `logger`.
"""

import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

INTERRUPTED = 130
"""Exit code of an interrupted run, as shells give it for SIGINT."""

LONGEST_LINE = 1000  # characters

logger = logging.getLogger("frugal")
"""The logger of the whole package, to which applications attach handlers."""


class FrugalError(Exception):
    """A user's mistake, or a shortage that the user can do something about.

    `what` is one line, `because` the lines with the numbers, `hint` something that would work.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, because: str | Sequence[str] = (), hint: str | None = None) -> None:
        self.what = what
        self.because = (because,) if isinstance(because, str) else tuple(because)
        self.hint = hint
        super().__init__(self.render())

    def render(self) -> str:
        """Return the message, as printed after `error: `. Lines are cut to `LONGEST_LINE`: a quoted file may be
        endless."""
        lines = [self.what, *(f"  because {line}" for line in self.because)]
        if self.hint:
            lines += ["", f"hint: {self.hint}"]
        return "\n".join(line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..." for line in lines)


class RequestError(FrugalError):
    """An error in the request."""

    exit_code = 2


class NothingFitsError(FrugalError):
    """An error of planning: no strategy fits into the available memory."""

    exit_code = 3


class PlanMismatchError(FrugalError):
    """A mismatch between the plan and this run."""

    exit_code = 4


class OutOfMemoryError(FrugalError):
    """A lack of memory, with nothing smaller left to try."""

    exit_code = 5


class CheckpointError(FrugalError):
    """A checkpoint that cannot be read or written."""

    exit_code = 6


class NumbersError(FrugalError):
    """A loss or gradient that is NaN or infinite, in a run that was to stop for that."""

    exit_code = 7


def refuse(*cases: tuple[object, str, str | Sequence[str], str | None]) -> None:
    """Raise the first case whose condition holds: `(condition, what, because, hint)`.

    Raises:
        RequestError: one does.
    """
    for holds, what, because, hint in cases:
        if holds:
            raise RequestError(what, because=because or (), hint=hint)


@contextmanager
def failure(
    what: str, *of: type[Exception], hint: str | None = None, raises: type[FrugalError] = RequestError
) -> Iterator[None]:
    """Turn the errors `of` these types, raised inside the `with` block, into one of a user; a FrugalError stays.

    Without types it is any error that a user's code or a library's checks raise, and the exit that scripts end with.
    The hint is to install what a script lacks, if `what` does not name it.

    Raises:
        FrugalError: of the type `raises`: `what`, because of the error's first line, or of the system's reason.
    """
    types = of or (Exception, SystemExit)
    try:
        yield
    except FrugalError:
        raise
    except types as error:
        because = [first_line(error), *places(error)[-1:]]
        if of:  # what failed is known: the error's type says no more
            because = [getattr(error, "strerror", None) or because[0].removeprefix(f"{type(error).__name__}: ")]
        raise raises(what, because=because, hint=how_to_install(error, what) or hint) from None


def how_to_install(error: BaseException, what: str = "") -> str | None:
    """Return how to install what an error misses, unless `what` names it; None where nothing is missing."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"install it into this Python: pip install {missing}" if missing and missing not in what else None


def places(error: BaseException) -> list[str]:
    """Return the lines of a user's own files through which an error came, as `net.py, line 3, runs `x = y``."""
    libraries = (str(Path(__file__).parent), str(Path(traceback.__file__).parent), "<")
    return [
        f"{Path(each.filename).name}, line {each.lineno}, runs `{each.line}`"
        for each in traceback.extract_tb(error.__traceback__)
        if not each.filename.startswith(libraries) and "-packages/" not in each.filename
    ]


def first_line(error: BaseException) -> str:
    """Return the type and the first line of any error, for a `because`: `KeyError: 'n_layers'`."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
