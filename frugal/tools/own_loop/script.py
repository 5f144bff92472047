"""A user's script: its step, and functions for the step's parameters, found by name.

    def model(): ...                            # made once, before the first step
    def optimizer(model): ...                   # parts may take parts
    def batch(): ...                            # made anew before every step
    def step(model, optimizer, batch): ...

A part is a function, which is called, or any other value, which is used directly. Only the script itself moves tensors
to the card. Everything runs as it would in a loop

    for batch in ...:
        step(model, optimizer, batch)

so the batch before lives until the next is made, and nothing holds the result of a step.
"""

import functools
import inspect
import runpy
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from frugal.dryrun.trace.recorder import package_folder
from frugal.errors import FrugalError, RequestError, first_line
from frugal.models import factories
from frugal.tools.own_loop.card import ValuesNeededError

BATCH = "batch"  # the one part that is made for every step

Guard = Callable[[], AbstractContextManager[Any]]


class Script:
    """A step and the parts that it takes."""

    def __init__(self, name: str, step: Callable[..., Any], parts: Mapping[str, Any]) -> None:
        """Make a script. `name`: shown in messages. `parts`: the function or value for each part, by name; may have
        more."""
        self.name = name
        self._step = step
        self._parts = parts
        self._made: dict[str, Any] = {}
        self._making: list[str] = []

    @classmethod
    def load(cls, reference: str) -> "Script":
        """Import the script of `FILE.py:STEP`; the step of `FILE.py` alone runs it whole, as its main program.

        Raises:
            RequestError: it cannot be imported.
        """
        if reference.endswith(".py"):
            run = functools.partial(runpy.run_path, str(Path(reference).expanduser()), run_name="__main__")
            return cls(Path(reference).name, run, {})
        step = factories.import_callable(
            reference, "the script's own arguments follow `--`, and its loop stands under main"
        )
        return cls(Path(reference.rpartition(":")[0]).name, step, inspect.unwrap(step).__globals__)

    def prepare(self) -> dict[str, Any]:
        """Make and return every part but the batch.

        Raises:
            RequestError: one is missing, or cannot be made.
        """
        self._arguments(self._step, but=BATCH)
        if BATCH in self._wanted(self._step) and BATCH not in self._parts:
            raise self._missing(BATCH)
        return self._made

    def run(
        self, num_steps: int, before_each: Callable[[], None] = lambda: None, batching: Guard = nullcontext
    ) -> None:
        """Run all steps. `batching`: a context in which batches are made."""
        takes_batch = BATCH in self._wanted(self._step)
        for _ in range(num_steps):
            before_each()
            if takes_batch:
                with batching():
                    made = self._make(BATCH)
                self._made[BATCH] = made
                del made
            arguments = self._arguments(self._step)
            with failures(self.name, getattr(self._step, "__name__", None)):
                self._step(**arguments)
            del arguments

    def _arguments(self, function: Callable[..., Any], but: str = "") -> dict[str, Any]:
        """Return the parts that a function wants, made where they are not yet."""
        for name in self._wanted(function):
            if name not in self._made and name != but:
                self._made[name] = self._make(name)
        return {name: self._made[name] for name in self._wanted(function) if name != but}

    def _make(self, name: str) -> Any:
        if name not in self._parts:
            raise self._missing(name)
        part = self._parts[name]
        if isinstance(part, nn.Module) or not (inspect.isroutine(part) or inspect.isclass(part)):
            return part
        if name in self._making:
            circle = " -> ".join((*self._making[self._making.index(name) :], name))
            raise RequestError(f"the parts of {self.name} need each other in a circle", because=circle)
        self._making.append(name)
        try:
            arguments = self._arguments(part)
            with failures(self.name, name):
                return part(**arguments)
        finally:
            self._making.pop()

    def _wanted(self, function: Callable[..., Any]) -> list[str]:
        """Return the names of a function's parameters without a default."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind in kinds and parameter.default is inspect.Parameter.empty
        ]

    def _missing(self, name: str) -> RequestError:
        takers = [self._step, *(part for key, part in self._parts.items() if key in self._making and callable(part))]
        taker = next(each for each in reversed(takers) if name in self._wanted(each))
        wanted = ", ".join(self._wanted(taker))
        return RequestError(
            f"{self.name} has no `{name}`",
            because=f"`{getattr(taker, '__name__', 'step')}({wanted})` takes it",
            hint=f"define `def {name}(): ...`, which returns it, or give the parameter a default",
        )


_NO_VALUES = ("meta tensor", "Meta tensor", "meta device", "register_meta", "no data")
_VALUES_HINT = (
    "a dry run knows shapes, not values: `.item()` is answered; leave `.tolist()` and code that depends on it out of "
    "the step, or run it on the host with the batch"
)
_HINTS = {
    "on the same device": "a dry run moves nothing by itself: move the model and the batch to the card, as on a GPU",
    "not compiled with CUDA": "this name of torch.cuda is not available in a dry run: leave it out of the step",
    "process group": "a dry run has no DistributedDataParallel and no FSDP: run the script as on one GPU, without them",
}
_OURS = (AssertionError, AttributeError, KeyError, NameError, TypeError)
_SHOWN_FRAMES = 3


@contextmanager
def failures(script: str, part: str | None) -> Iterator[None]:
    """Turn errors of a user's code inside the `with` block into one message with the lines that failed.

    `part`: the name of the function that runs; None: the whole script.

    Raises:
        RequestError: it failed. Errors that are our bug pass unchanged.
    """
    try:
        yield
    except FrugalError:
        raise
    except (Exception, SystemExit) as error:  # a user's script may raise anything, and scripts like to exit
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, _OURS) and Path(frames[-1].filename).is_relative_to(package_folder("frugal") / "dryrun"):
            raise
        text, hints = str(error), _HINTS
        if isinstance(error, ValuesNeededError | NotImplementedError) or any(words in text for words in _NO_VALUES):
            hints = {"": _VALUES_HINT}
        raise RequestError(
            f"{f'`{part}` of ' * bool(part)}{script} fails in a dry run",
            because=[first_line(error), *_lines_of(frames)],
            hint=next((hint for words, hint in hints.items() if words in text), None),
        ) from None


def _lines_of(frames: list[traceback.FrameSummary]) -> list[str]:
    """Return the innermost lines of the user's own code."""
    packages = [package_folder(name) for name in ("torch", "frugal", "deepspeed", "transformers")]
    own = [
        frame
        for frame in frames
        if not any(Path(frame.filename).is_relative_to(folder) for folder in packages)
        and not frame.filename.startswith("<")
        and "site-packages" not in frame.filename
    ]
    return [f"{Path(each.filename).name}, line {each.lineno}, runs `{each.line}`" for each in own[-_SHOWN_FRAMES:]]
