"""Trackers of experiments, such as TensorBoard, W&B and MLflow, by the classes that accelerate has for them.

    train/loss, train/learning_rate, train/grad_norm, train/tokens_per_second, train/memory_bytes     each step
    eval/loss, eval/perplexity      each evaluation
    test/loss, test/perplexity      at the end, with --test-data; final_train/loss of samples that were trained on

The request is stored as hyper-parameters at a run's first start. A resumed run continues the curves: its files are in
the run's folder (TensorBoard, Aim), or the id of its run with a service is (W&B, MLflow: `trackers.json`). TensorBoard
drops its records beyond the step from which it resumes. The other services begin another run.

A tracker that fails during training is left out from there on, with a warning: `metrics.jsonl` has everything.
"""

import importlib.util
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from frugal import files
from frugal.errors import RequestError, failure, first_line, logger, refuse
from frugal.planning.plan import Plan

RECORD = "trackers.json"
"""In the run's folder: ids of runs with services, by the tracker's name."""

_GROUPS = {"step": "train", "evaluation": "eval", "test": "test", "train": "final_train"}
_CURVES = ("loss", "perplexity", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes")
_OF_NO_RUN = {"out", "track", "grace"}


def check(names: Sequence[str]) -> None:
    """Check that the libraries of these trackers are installed.

    Raises:
        RequestError: one is not.
    """
    refuse(
        *(
            (
                importlib.util.find_spec(name) is None,
                f"--track {name} needs the library {name}",
                "it is not installed",
                f"pip install {name.replace('_', '-')}, or leave --track {name} out",
            )
            for name in names
        )
    )


class Trackers:
    """The trackers of one run, on rank 0. `folder` is the run's; the next step is number `first_step` + 1.

    Raises:
        RequestError: one is not installed, or cannot be started.
    """

    def __init__(self, names: Sequence[str], folder: Path, hyperparameters: Mapping[str, Any], first_step: int) -> None:
        check(names)
        known = _read_ids(folder)
        self._trackers: dict[str, Any] = {}
        for name in dict.fromkeys(names):
            remedy = f"see to it that {name} works here, or leave --track {name} out"
            with failure(f"cannot start the tracker {name}", hint=remedy):  # services fail in many ways
                self._trackers[name] = tracker = _start(name, folder, known.get(name), first_step)
                if name not in known:
                    tracker.store_init_configuration(dict(hyperparameters))
                    own = tracker.tracker  # an id where a service has the run, none where its files are in the folder
                    known[name] = own.id if name == "wandb" else own.info.run_id if name == "mlflow" else ""
                    files.write_file(folder / RECORD, msgspec.json.encode(known) + b"\n")

    def record(self, event: str, values: Mapping[str, Any]) -> None:
        """Log the numbers of a record of `metrics.jsonl` that belong to a curve."""
        group = _GROUPS.get(event)
        if group is not None:
            shown = {name: values.get(name) for name in _CURVES} | values.get("metrics", {})
            numbers = {f"{group}/{name}": value for name, value in shown.items() if value is not None}
            self._each(lambda tracker: tracker.log(numbers, step=values["step"]))

    def finish(self) -> None:
        """End all trackers."""
        self._each(lambda tracker: tracker.finish())
        self._trackers.clear()

    def _each(self, action: Callable[[Any], object]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:  # as in starting it; a run of weeks does not end for it
                del self._trackers[name]
                logger.warning("the tracker %s is left out from here on: %s", name, first_line(error))


def hyperparameters(plan: Plan, settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the request, the `settings` and the decisions of a run, as trackers take them."""
    asked = {field.name: getattr(plan.request, field.name) for field in fields(plan.request)}
    run = {name: value for name, value in settings.items() if name not in _OF_NO_RUN}
    decided = {
        "learning_rate": plan.request.scaled_learning_rate,
        "world_size": plan.batch.world_size,
        "largest_micro_batch": plan.batch.largest_micro_batch,
        "accumulation_steps": plan.batch.accumulation_steps,
        "strategy": str(plan.strategy),
        "num_parameters": plan.model.parameters,
        "plan_digest": plan.digest,
    }
    return {
        name: value if isinstance(value, bool | int | float)
        else ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in (asked | run | decided).items()
        if value not in (None, ())
    }  # fmt: skip


def _start(name: str, folder: Path, known: str | None, first_step: int) -> Any:
    """Return accelerate's tracker, started; `known`: the id of the run that it continues."""
    from accelerate import tracking  # type: ignore[import-untyped]  # has no types

    # accelerate's own logger asks an Accelerator, which would set devices and threads anew.
    tracking.logger = logging.getLogger(tracking.__name__)
    kind = tracking.LOGGER_TYPE_TO_CLASS[name]
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"purge_step": first_step + 1} if first_step else {},
        "wandb": {"id": known or uuid.uuid4().hex, "name": folder.name, "resume": "allow", "dir": str(folder)},
        "mlflow": {"run_id": known} if known else {"run_name": folder.name},
    }
    place = (name, str(folder)) if kind.requires_logging_directory else ("frugal",)
    tracker = kind(*place, **options.get(name, {}))
    tracker.main_process_only = False  # this is rank 0; otherwise an Accelerator would be asked, as above
    tracker.start()
    return tracker


def _read_ids(folder: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(files.read_regular(folder / RECORD), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f"cannot read {folder / RECORD}",
            because=first_line(error),
            hint="remove it to begin new runs with the trackers",
        ) from None
