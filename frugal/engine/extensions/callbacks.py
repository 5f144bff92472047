"""The user's own callbacks, which are called after a step, an evaluation and a checkpoint, on every rank.

    class Stop:                                          # --set train.callback=mine.py:Stop
        def on_step(self, engine, step, result):         # result: StepResult
            engine.wants_to_stop = result.loss < 0.1     # of any rank: ends the run after the next step, saved
        def on_evaluation(self, engine, step, evaluation):
            ...
        def on_save(self, engine, step, folder):         # the checkpoint's folder, complete
            ...

An object has any of the three methods. They are called between two steps, so training waits for them. A collective
such as `engine.evaluate` must be called on every rank. An exception ends the run.
"""

import traceback
from collections.abc import Sequence
from typing import Any

from frugal.distributed import rank_logs
from frugal.errors import FrugalError, RequestError, failure, first_line, refuse
from frugal.models.factories import import_callable

METHODS = ("on_step", "on_evaluation", "on_save")


class Callbacks:
    """The callbacks of one run, which are called one after the other.

    Raises:
        RequestError: one has none of the three methods.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self._callbacks = tuple(callbacks)
        refuse(
            *(
                (
                    not any(callable(getattr(each, name, None)) for name in METHODS),
                    f"{type(each).__name__} is no callback",
                    f"it has no method {', '.join(METHODS[:-1])} or {METHODS[-1]}",
                    None,
                )
                for each in self._callbacks
            )
        )

    @classmethod
    def load(cls, references: Sequence[str]) -> "Callbacks":
        """Make callbacks by calling each `file.py:name`, a class or a function, without arguments.

        Raises:
            RequestError: there is none of this name, it failed, or it made something else.
        """
        made = []
        for reference in references:
            make = import_callable(reference)
            with failure(f"the callback {reference} failed"):
                made.append(make())
        return cls(made)

    def call(self, method: str, engine: Any, step: int, what: Any) -> None:
        """Call this method of the callbacks that have it.

        `what`: the result of optimizer step number `step` (from 1), or, after `step` steps, an evaluation or the folder
        of a checkpoint, which is complete on the disk.
        """
        for each in self._callbacks:
            function = getattr(each, method, None)
            if function is None:
                continue
            try:
                function(engine, step, what)
            except FrugalError:
                raise
            except Exception as error:  # a user's code may raise anything
                rank_logs.to_file(traceback.format_exc().rstrip())
                name = f"the callback {type(each).__name__}.{method}"
                raise RequestError(f"{name} failed", because=first_line(error)) from error
