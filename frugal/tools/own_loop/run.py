"""The dry run of a user's own step: its memory on a card that is not there, with or without DeepSpeed.

A script has a step, and functions for the step's parameters, found by name:

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
import gc
import inspect
import re
import runpy
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by the first operator that needs it, it would keep the frames of the script
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from frugal.config.hardware.cluster import ASSUMED_CAPABILITY, Cluster
from frugal.config.schema import understand
from frugal.deepspeed_adapter import stages
from frugal.deepspeed_adapter.simulate.fake_device import pretend
from frugal.dryrun.compare import Figures, predicted
from frugal.dryrun.messages import DryRun
from frugal.dryrun.trace.cuda_kernels import kernels_of
from frugal.dryrun.trace.recorder import not_collected, package_folder
from frugal.errors import FrugalError, RequestError, first_line, how_to_install, places, refuse
from frugal.models import factories, transformers_internals
from frugal.models.objectives import required
from frugal.planning.memory.timeline import FORWARD
from frugal.tools.own_loop.card import ValuesNeededError, pretended_card
from frugal.tools.own_loop.tracker import LoopTracker, kept_by_model, kept_by_optimizer

NUM_STEPS = 2
"""Steps of a dry run: the first makes gradients and states, the second is as all later ones."""

MAX_RANKS = 3
"""Ranks that are dry-run of a larger world: the first, the last, and one in between."""


@dataclass(frozen=True, kw_only=True)
class LoopFigures(Figures):
    """The figures of a user's own loop. Everything is in bytes.

    Attributes:
        notes: assumptions about data.
    """

    notes: tuple[str, ...] = ()


def dry_run(
    step: Callable[..., Any],
    *,
    gpu: str | None = None,
    mem: str | None = None,
    gpus: int = 1,
    steps: int = NUM_STEPS,
    expandable_segments: bool = False,
    torch_version: str | None = None,
    **parts: Any,
) -> LoopFigures:
    """Return the memory of `step` on a GPU, from a dry run on tensors without storage. No GPU is needed.

    `parts` has for each parameter of `step` a function that makes it, or the value itself: `model=...`,
    `optimizer=...`, `batch=...`. Functions may take other parts by name. All are called on the pretended card, where
    `cuda` works as on a GPU; `batch` is called anew before every step.

    Args:
        step: one optimizer step of yours.
        gpu: a card, such as `rtx3060-12g`; see `frugal plan --help`.
        mem: its memory, such as `12G`, if it is not the card's own.
        gpus: the world size that DeepSpeed is to see.
        steps: how often `step` is called. Two show the peak of all later ones: optimizer states exist in the second.
        expandable_segments: whether `PYTORCH_ALLOC_CONF` is to say `expandable_segments:True`.
        torch_version: of the run, such as `2.6`, if it is another than this one; decides cuBLAS's workspaces
            and whether RMSNorm is fused.
        parts: the arguments of `step`, by name.

    Raises:
        RequestError: a part is missing, or the step cannot be dry-run.
    """
    settings: dict[str, Any] = {"gpus": gpus, "gpu": gpu, "mem": mem, "model": "gpt2", "precision": "fp32"}
    if gpu is None and mem is None:
        settings["mem"] = "80G"
    _, cluster, _ = understand({name: value for name, value in settings.items() if value is not None})
    name = getattr(step, "__module__", None) or "the script"
    build: dict[str, Any] = {
        "expandable_segments": expandable_segments,
        "torch_version": version_of_torch(torch_version),
    }
    runs = dry_runs(lambda: Script(name, step, parts), cluster, steps, **build)
    result = predicted(runs, cluster, expandable_segments=expandable_segments)  # of the fullest rank
    notes = tuple(dict.fromkeys(note for each in runs for note in each.notes))
    return LoopFigures(**vars(result), notes=notes)


def version_of_torch(text: str | None) -> tuple[int, int] | None:
    """Return the first two numbers of a version; None for this one's. Raises: RequestError, if it is none."""
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})(?!\d)", text or "")
    refuse((text is not None and numbers is None, f"{text} is no version of torch", "", "write it as 2.6 or 2.6.0"))
    return numbers and (int(numbers[1]), int(numbers[2]))


def dry_runs(
    load: Callable[[], "Script"], cluster: Cluster, num_steps: int, *, ends_after: int | None = None, **build: Any
) -> list[DryRun]:
    """Dry-run the ranks that may be the fullest. `load` is called for each, on the pretended card; `ends_after`: see
    `ending`; `build`: of torch and its allocator, see `LoopTracker`."""
    world_size = cluster.world_size
    ranks = range(world_size) if world_size <= MAX_RANKS else (0, world_size // 2, world_size - 1)
    device = min(cluster.devices, key=lambda device: device.usable_bytes)
    capability = device.compute_capability or ASSUMED_CAPABILITY
    runs = []
    for rank in ranks:
        tracker = LoopTracker(capability, device.resident_threads, **build)

        def begin(tracker: LoopTracker = tracker) -> None:
            gc.collect()
            tracker.mark(FORWARD)

        with (
            pretend(
                rank=rank,
                world_size=world_size,
                side_stream=tracker.side_stream,
                pinning=tracker.host.pinning,
                empty_cache=tracker.empty_cache,
            ),
            kernels_of("cuda", tracker.capability, build.get("torch_version")),
            transformers_internals.as_imported(),
            not_collected(),
            register_optimizer_step_post_hook(tracker.stepped),
            register_optimizer_step_pre_hook(ending(ends_after)),
            pretended_card(tracker, device, capability),
        ):
            script = load()
            _follow(tracker, script.prepare())
            script.run(num_steps, before_each=begin, batching=tracker.on_host)
            tracker.mark(FORWARD)
            if not tracker.timeline().fixed:
                raise RequestError(
                    f"{script.name} puts nothing on the card",
                    because=f"after {num_steps} calls of its step no tensor was there",
                    hint="move the model and the batch to it: model.cuda(), batch.cuda()",
                )
            made = DryRun(
                timeline=tracker.timeline(),
                micro_batch=1,
                host_bytes=tracker.host.peak_bytes,
                notes=tracker.notes,
                counts=tracker.counts,
            )
            runs.append(made)
            del script
        gc.collect()
    return runs


def _follow(tracker: LoopTracker, part: Any) -> None:
    """Let the tracker know the purpose of a part's tensors, and of the items of lists and dictionaries."""
    if isinstance(part, dict):
        part = list(part.values())
    if isinstance(part, (list, tuple)):
        for each in part:
            _follow(tracker, each)
    elif isinstance(part, nn.Module):
        tracker.follow(part)
        tracker.overlaps |= stages.overlaps(part)
        tracker.kept.append(lambda: stages.kept_by(part) or kept_by_model(part))
    elif isinstance(part, torch.optim.Optimizer):
        tracker.kept.append(lambda: kept_by_optimizer(part))


class Ended(BaseException):
    """The end of a script that took enough optimizer steps; no `except Exception` of the script stops it."""


def ending(num_steps: int | None) -> Callable[..., None]:
    """Return a hook that raises `Ended` when an optimizer begins its step `num_steps` + 1; None: never.

    By then forward and backward of that step ran beside optimizer states. DeepSpeed's ZeRO-3 calls an optimizer once
    for each group of parameters, so steps are counted by the first parameter.
    """
    begun: Counter[tuple[int, int]] = Counter()

    def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        first = next((id(each) for group in optimizer.param_groups for each in group["params"]), 0)
        begun[id(optimizer), first] += 1
        if num_steps is not None and begun[id(optimizer), first] > num_steps:
            raise Ended

    return begin


BATCH = "batch"  # the one part that is made for every step

Guard = Callable[[], AbstractContextManager[Any]]


class Script:
    """A step and the parts that it takes."""

    def __init__(
        self, name: str, step: Callable[..., Any], parts: Mapping[str, Any], running: Guard = nullcontext
    ) -> None:
        """Make a script. `name`: shown in messages. `parts`: the function or value for each part, by name; may have
        more. `running`: a context in which its code runs."""
        self.name = name
        self._running = running
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
        path = Path(reference.rpartition(":")[0] or reference).expanduser()
        running = functools.partial(factories.importable, str(path))
        if reference.endswith(".py"):
            return cls(path.name, functools.partial(runpy.run_path, str(path), run_name="__main__"), {}, running)
        step = factories.import_callable(
            reference, "the script's own arguments follow `--`, and its loop stands under main"
        )
        return cls(path.name, step, inspect.unwrap(step).__globals__, running)

    def prepare(self) -> dict[str, Any]:
        """Make and return every part but the batch.

        Raises:
            RequestError: one is missing, or cannot be made.
        """
        self._arguments(self._step, but=BATCH)
        if BATCH in required(self._step) and BATCH not in self._parts:
            raise self._missing(BATCH)
        return self._made

    def run(
        self, num_steps: int, before_each: Callable[[], None] = lambda: None, batching: Guard = nullcontext
    ) -> None:
        """Run all steps. `batching`: a context in which batches are made."""
        takes_batch = BATCH in required(self._step)
        for _ in range(num_steps):
            before_each()
            if takes_batch:
                with batching():
                    made = self._make(BATCH)
                self._made[BATCH] = made
                del made
            arguments = self._arguments(self._step)
            with failures(self.name, getattr(self._step, "__name__", None)), suppress(Ended), self._running():
                self._step(**arguments)
            del arguments

    def _arguments(self, function: Callable[..., Any], but: str = "") -> dict[str, Any]:
        """Return the parts that a function wants, made where they are not yet."""
        for name in required(function):
            if name not in self._made and name != but:
                self._made[name] = self._make(name)
        return {name: self._made[name] for name in required(function) if name != but}

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
            with failures(self.name, name), self._running():
                return part(**arguments)
        finally:
            self._making.pop()

    def _missing(self, name: str) -> RequestError:
        takers = [self._step, *(part for key, part in self._parts.items() if key in self._making and callable(part))]
        taker = next(each for each in reversed(takers) if name in required(each))
        wanted = ", ".join(required(taker))
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
_ONE_GPU = "a dry run has no DistributedDataParallel and no FSDP: run the script as on one GPU, without them"
_HINTS = {
    "on the same device": "a dry run moves nothing by itself: move the model and the batch to the card, as on a GPU",
    "not compiled with CUDA": "this name of torch.cuda is not available in a dry run: leave it out of the step",
    "You requested gpu": _ONE_GPU,  # Lightning with several devices
    "process group": _ONE_GPU,
    "DDP expects": _ONE_GPU,
    "Cannot access accelerator": _ONE_GPU,  # FSDP
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
        if isinstance(error, SystemExit):
            hints = {"": "the script ended itself; its own arguments follow `--`"}
        elif isinstance(error, ValuesNeededError | NotImplementedError) or any(words in text for words in _NO_VALUES):
            hints = {"": _VALUES_HINT}
        where = f"`{part}` of {script}" if part else str(script)
        raise RequestError(
            f"{where} fails in a dry run",
            because=[first_line(error), *places(error)[-_SHOWN_FRAMES:]],
            hint=how_to_install(error) or next((hint for words, hint in hints.items() if words in text), None),
        ) from None
