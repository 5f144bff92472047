"""One dry run: the training engine itself, on a pretended device, for two optimizer steps.

Where the model's forward fails on the inputs of a dry run, the error names the cause and a remedy.
"""

import gc
import traceback
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import nn

from frugal import torch_internals
from frugal.deepspeed_adapter.engine import destroy, told_of_arrivals
from frugal.deepspeed_adapter.simulate.fake_device import pretend
from frugal.deepspeed_adapter.stages import Zero
from frugal.deepspeed_adapter.zero3_graph import SplitReads
from frugal.distributed import process_group
from frugal.dryrun.messages import AskDryRun, DryRun
from frugal.dryrun.trace.cuda_kernels import kernels_of
from frugal.dryrun.trace.recorder import Tracker, TypesDifferError, not_collected, package_folder
from frugal.engine.measure.run_gauge import mark_phases
from frugal.engine.train_step import accumulate, wrap
from frugal.errors import RequestError, first_line
from frugal.models.fused import liger_internals
from frugal.models.loading import quantised
from frugal.models.objectives import Objective, SummedLoss
from frugal.models.sequence_parallel import parts_of
from frugal.planning.batch import BatchPlan
from frugal.planning.cost import Counts


def dry_run(build: Callable[[], nn.Module], objective: Objective, asked: AskDryRun) -> DryRun:
    """Dry-run the rank that is asked for. `build` makes the model on meta, anew because ZeRO-3 takes models apart.

    A model that reads an integer from its data gets the longest dimension of a batch, and 1 if it rejects that; a
    model that rejects both gets "no" where it asks whether a condition on its data is true (LED: a global attention;
    others raise an error where a number is NaN).
    """
    objective = parts_of(objective, asked.strategy.sequence_parallel, asked.rank)
    if asked.kind == "cpu":
        asked = replace(asked, strategy=asked.strategy.where_the_host_is_the_device)
    failure: Exception | None = None
    for integer, condition in ((None, True), (1, True), (None, False)):
        tracker = Tracker(
            asked.kind,
            integer,
            asked.capability,
            asked.resident_threads,
            builds_elsewhere=asked.by_tensor,
            assumed_condition=condition,
        )
        try:
            return _dry_run(tracker, build, objective, asked)
        except (ArithmeticError, AssertionError, IndexError, RuntimeError, ValueError) as error:
            failure = failure or error
            if not tracker.was_asked:
                break
    assert failure is not None  # the loop returns otherwise
    raise failure


def _dry_run(tracker: Tracker, build: Callable[[], nn.Module], objective: Objective, asked: AskDryRun) -> DryRun:
    kind, strategy, shared_by = asked.kind, asked.strategy, asked.strategy.sequence_parallel
    caps = (asked.micro_batch,) * (asked.world_size // shared_by)
    batch = BatchPlan.of(sum(caps) * asked.accumulation_steps, caps, sequence_parallel=shared_by)
    side_stream = tracker.side_streams.at_work if kind == "cuda" and strategy.overlap_comm else None
    pinning = tracker.host.pinning if kind == "cuda" else None
    with (
        pretend(
            rank=asked.rank,
            world_size=asked.world_size,
            side_stream=side_stream,
            pinning=pinning,
            empty_cache=tracker.empty_cache,
        ),
        kernels_of(kind, tracker.capability),
        not_collected(),
        torch.compiler.set_stance("force_eager"),  # nothing can be compiled for tensors without storage
    ):
        with ExitStack() as engines:  # one that is refused in its forward leaves nothing behind in this process
            with tracker:
                model = build()
                gc.freeze()  # until `not_collected` ends: each collection would visit all modules of a large model
                tracker.watch(model)
                if strategy.zero_stage < 3:
                    tracker.arrive(*model.parameters(), *model.buffers(), *quantised.scales(model))
                with told_of_arrivals(tracker.arrive):
                    process_group.form()
                    zero = wrap(model, asked.request, strategy, batch)
                    engines.callback(destroy, zero)
                tracker.arrive(*model.parameters(), *model.buffers(), *quantised.scales(model))
                gc.collect()
                gc.freeze()
                tracker.relabel(zero.kept())
                counts = _train(tracker, zero, objective, asked)
            recorded = DryRun(
                timeline=tracker.timeline(),
                micro_batch=asked.micro_batch,
                host_bytes=tracker.host.peak_bytes,
                notes=tracker.notes,
                counts=counts,
            )
        del zero, model
        gc.collect()
    return recorded


def _train(tracker: Tracker, zero: Zero, objective: Objective, asked: AskDryRun) -> Counts:
    """Run an optimizer step for each number of micro-steps, and return the counts of one micro-step of the last."""

    def mark(phase: str) -> None:
        gc.collect()
        tracker.relabel(zero.kept())
        tracker.mark(phase)

    marked = mark_phases(zero.engine, objective, mark)
    with torch_internals.without_modes():  # made on the host, whatever their values cost
        example = objective.example(asked.micro_batch, asked.request.seq_len)
    tracker.expect(example)
    for num_micro_steps in (asked.first_micro_steps or asked.accumulation_steps, asked.accumulation_steps):
        batches = [example] * num_micro_steps
        if tracker.kind == "cpu":  # there the host is the device, and holds all of them
            batches = [{name: tensor.to("meta") for name, tensor in batch.items()} for batch in batches]
        before = tracker.counts
        with (
            liger_internals.noted(asked.strategy.kernels, asked.multiprocessors, tracker.launched),
            SplitReads(zero.engine.module)
            if asked.strategy.zero_stage == 3 and isinstance(objective, SummedLoss)  # a model of the user's own
            else nullcontext(),
        ):
            accumulate(zero.engine, marked, batches, targets=1)
        done = tracker.counts - before
        del batches
        zero.engine.step()
    gc.collect()
    tracker.relabel(zero.kept())
    return Counts({name: count // num_micro_steps for name, count in done.items()})


_RUNS_A_FORWARD = ("loss_sum", "recompute_fn")  # of an objective, and of torch's activation checkpointing
_READ_THE_OUTPUT = ("objectives.py",)  # of ours the only file that a model's outputs can make fail
_HINTS = {
    ("raised by the model: ",): (
        "the model's own code refuses this: change what it names with --seq-len or in its config.json; if it takes "
        "other inputs or must be made ready first, give a factory, FILE.py:NAME, that returns (module, objective)"
    ),
    ("NotImplementedError", "meta tensor", "Meta tensor", "meta device", "register_meta"): (
        "a dry run knows shapes, not values: tensors that depend on values must come with the batch"
    ),
    ("expected device meta", "same device"): (
        "a model moves its parameters and buffers alone: keep other tensors with self.register_buffer(name, tensor)"
    ),
    ("dtype", "scalar type", " type (", "the type "): (
        "give numbers that are multiplied with weights as floating-point numbers, and cast them to the type of the "
        "weights, x.to(self.layer.weight.dtype); whole numbers are for embeddings and classes"
    ),
    ("",): (
        "if it takes or returns something else, give a factory that returns (module, objective), for example "
        "frugal.SummedLoss(loss, example=...)"
    ),
}
"""Hints by words of an error, the first where the model's own code raises it; the last, whatever it says."""


def failure_in_forward(model: str, error: Exception) -> RequestError | None:
    """Return an error for the user of `model` if `error` comes from its forward; None if it is our bug."""
    frames = traceback.extract_tb(error.__traceback__)
    runs = [i for i, frame in enumerate(frames) if frame.name in _RUNS_A_FORWARD]
    if not runs or _is_of("deepspeed", frames[-1]):
        return None
    is_theirs = isinstance(error, TypesDifferError) or Path(frames[-1].filename).name in _READ_THE_OUTPUT
    if _is_of("frugal", frames[-1]) and not is_theirs:
        return None
    because = [first_line(error)]
    theirs = [each for each in frames[runs[0] + 1 :] if not any(_is_of(name, each) for name in _PACKAGES)]
    is_refused = theirs[-1:] == frames[-1:] and (frames[-1].line or "").startswith("raise ")
    text = f"{'raised by the model: ' if is_refused else ''}{type(error).__name__}: {error}"
    hint = next((hint for words, hint in _HINTS.items() if any(each in text for each in words)), None)
    if theirs:
        because.append(f"{Path(theirs[-1].filename).name}, line {theirs[-1].lineno}, runs `{theirs[-1].line}`")
    return RequestError(f"the forward of {model} fails in a dry run", because=because, hint=hint)


_PACKAGES = ("torch", "frugal", "deepspeed")


def _is_of(package: str, frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(package_folder(package))
