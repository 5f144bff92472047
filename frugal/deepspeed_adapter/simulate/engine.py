"""Optimizer steps under DeepSpeed by arithmetic: the recording of a dry run, from the trace of one micro-step."""

from collections.abc import Sequence

from frugal.config.hardware.cluster import DeviceKind
from frugal.config.request import Request
from frugal.deepspeed_adapter.simulate import mirrored
from frugal.deepspeed_adapter.simulate.stream import (
    SIMULATED,
    MicroStep,
    PinnedBlocks,
    Setting,
    SimulatedOptimizer,
    Stream,
    reduced_together,
)
from frugal.deepspeed_adapter.simulate.zero3 import SimulatedZero3
from frugal.deepspeed_adapter.simulate.zero12 import SimulatedZero12
from frugal.planning.memory.profile import RankMemory
from frugal.planning.memory.timeline import (
    ARRIVAL,
    BACKWARD,
    BATCH_ENDS,
    FORWARD,
    GRADIENTS,
    INITIALISATION,
    LOSS_ENDS,
    OPTIMIZER_STEP,
    PARAMETERS,
    ModelTrace,
)
from frugal.planning.strategy import Strategy, optimizer_implementation

REDUCED_TOGETHER = 500_000_000
"""Gradient elements that the engine concatenates for one all-reduce: its `MEMORY_OPT_ALLREDUCE_SIZE`."""


class SimulatedZero0(SimulatedOptimizer):
    """The optimizer of one rank at ZeRO stage 0, in fp32."""

    def __init__(self, stream: Stream, host: PinnedBlocks, setting: Setting) -> None:
        super().__init__(stream, host, setting)
        self._gradients: dict[int, int] = {}  # parameter -> storage

    def gradient(self, parameter: int, storage: int) -> None:
        """Keep a gradient; later micro-steps are added in place."""
        if parameter not in self._gradients:
            self._stream.hold(storage)
            self._stream.relabel(storage, GRADIENTS)
            self._gradients[parameter] = storage

    def end(self) -> None:
        """End backward: all-reduce gradients, several in one (`DeepSpeedEngine.allreduce_no_retain`)."""
        elements = self._setting.elements
        for group in reduced_together(elements, REDUCED_TOGETHER) if self.is_boundary else ():
            if len(group) > 1:
                num_bytes = sum(elements[i] for i in group) * self._setting.element_bytes
                self._stream.flash(num_bytes, "aten.cat.default")

    def step(self) -> None:
        """Take the optimizer step, the first of which makes the states."""
        if not self._has_states:
            for elements in self._setting.elements:  # as the optimizer has them, not as they came
                self._setting.make_states(elements, self._stream)
            self._has_states = True
        for storage in self._gradients.values():
            self._stream.release(storage)
        self._gradients.clear()


def covers(request: Request, strategy: Strategy, trace: ModelTrace | None = None) -> bool:
    """Return whether the simulation covers a request under a strategy; with a `trace`, also for this model.

    It does not cover: other kernels than torch's fused ones and those of 8-bit AdamW (for states in bf16, or a part of
    them, on the host, than DeepSpeed's CPU Adam), offloading to disks, or in fp32 below ZeRO-3, overlapping
    communication, gradients not summed in fp32, half precision without gradient partitioning; and models whose memory
    depends on data, with trainable parameters of several types, without a gradient, or under ZeRO-3 used outside their
    modules; and any DeepSpeed other than the one it repeats.
    """
    if not mirrored.verify_simulation():
        return False
    levels = {strategy.offload_optimizer, strategy.offload_parameters}
    needs_deepspeeds = levels != {"none"} and (request.optimizer.states == "bf16" or strategy.offload_ratio < 1)
    known = "deepspeed" if needs_deepspeeds else SIMULATED[request.optimizer.name]
    if (
        optimizer_implementation(request, strategy) != known
        or request.optimizer.momentum
        or strategy.overlap_comm
        or not levels <= {"none", "cpu"}
        or ("cpu" in levels and request.precision == "fp32" and strategy.zero_stage < 3)
        or strategy.gradient_accumulation_dtype != "fp32"
        or (request.precision != "fp32" and strategy.zero_stage < 2)
    ):
        return False
    if trace is None:
        return True
    is_one_type = trace.element_bytes == request.element_bytes
    is_sure = trace.has_all_gradients and not trace.notes
    return is_one_type and is_sure and len(trace.trainable_index) > 1


Steps = Sequence[Sequence[Sequence[int] | None]]
"""The micro-steps of each optimizer step, as the bytes of the trace's storages in each; None: for any micro-batch."""


def equal_steps(accumulates: bool) -> Steps:
    """Return two optimizer steps for any micro-batch, as a dry run takes them: the first sets the stage for the second,
    also in the segments that its micro-steps leave."""
    micro_steps = [None] * (2 if accumulates else 1)
    return micro_steps, micro_steps


LAST_STEP: Steps = (), (None, None)
"""The second of `equal_steps` that accumulate, with the optimizer states of the first: up to ZeRO-2 it has the fullest
moments of both. With ZeRO-3 the first micro-steps gather otherwise than those that follow."""


def simulate(
    trace: ModelTrace,
    request: Request,
    strategy: Strategy,
    *,
    world_size: int,
    rank: int,
    kind: DeviceKind,
    steps: Steps,
    by_tensor: bool = False,
) -> RankMemory:
    """Return the memory of `rank` under `strategy`, as `frugal.dryrun.run` would record it.

    `by_tensor`: as in `frugal.dryrun.run`. Activations in host memory are in pinned blocks of a power
    of two bytes, counted as up to twice what they hold.

    Left out: operators on scalars, and what lives for the time of one operator on them.
    """
    stream = Stream(trace.stream.names)
    setting = Setting(trace, request, strategy, world_size=world_size, rank=rank)
    stream.phase(INITIALISATION)
    host = PinnedBlocks(stream, kind)
    optimizer = _initialised(stream, host, setting, trace, arrives=by_tensor or kind == "cuda")
    for micro_steps in steps:
        if micro_steps:
            _accumulate(stream, optimizer, [MicroStep(stream, trace, sizes) for sizes in micro_steps], kind)
        stream.phase(OPTIMIZER_STEP)
        optimizer.step()
    return RankMemory(
        rank=rank,
        timeline=stream.timeline(),
        host_bytes=host.allocator.peak_bytes,
        host_bytes_per_sample=int(trace.work.moved_per_sample),  # down and up: twice what is there
        gathers=optimizer.gathers,
    )


def _initialised(
    stream: Stream, host: PinnedBlocks, setting: Setting, trace: ModelTrace, *, arrives: bool
) -> SimulatedOptimizer:
    """Bring the model to the device, or build it there, and return the initialised optimizer."""
    if not arrives:
        stream.flash(trace.building_bytes, "building", PARAMETERS)
    split = SimulatedZero3(stream, host, setting, trace) if setting.strategy.zero_stage == 3 else None
    if split is not None and arrives:
        split.initialise(one_by_one=True)
    arrived = [stream.born(size_bytes, "to device", PARAMETERS) for size_bytes in trace.sizes_bytes if split is None]
    for size_bytes in trace.buffer_bytes:
        stream.born(size_bytes, "to device", PARAMETERS)
    if split is not None:
        if not arrives:  # it was built with its buffers
            split.initialise(one_by_one=False)
        return split
    if setting.strategy.zero_stage == 0:
        return SimulatedZero0(stream, host, setting)
    optimizer = SimulatedZero12(stream, host, setting)
    optimizer.initialise([storage for storage, trained in zip(arrived, trace.trainable, strict=True) if trained])
    return optimizer


def _accumulate(stream: Stream, optimizer: SimulatedOptimizer, steps: Sequence[MicroStep], kind: DeviceKind) -> None:
    """Play forward and backward of the micro-steps; on a CPU all batches are there from the beginning."""
    for step in steps if kind == "cpu" else steps[:1]:
        step.play(ARRIVAL, optimizer)
    for i, step in enumerate(steps):
        if i and kind != "cpu":
            step.play(ARRIVAL, optimizer)
            steps[i - 1].play(BATCH_ENDS, optimizer)
        stream.phase(FORWARD)
        step.play(FORWARD, optimizer)
        if i:
            steps[i - 1].play(LOSS_ENDS, optimizer)
        stream.phase(BACKWARD)
        optimizer.is_boundary = i == len(steps) - 1
        step.play(BACKWARD, optimizer)
        optimizer.end()
    for step in steps if kind == "cpu" else steps[-1:]:
        step.play(BATCH_ENDS, optimizer)
    steps[-1].play(LOSS_ENDS, optimizer)
