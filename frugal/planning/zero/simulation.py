"""Two optimizer steps under DeepSpeed, by arithmetic: what a rehearsal records, from the trace of one micro-step."""

from frugal.planning.profile import DeviceKind, RankMemory
from frugal.planning.request import Request
from frugal.planning.strategy import Strategy
from frugal.planning.timeline import PARAMETERS
from frugal.planning.zero.partitioned import Partitioned
from frugal.planning.zero.replicated import Replicated
from frugal.planning.zero.setting import Setting
from frugal.planning.zero.stream import MicroStep, Stream
from frugal.planning.zero.trace import ARRIVAL, END, ModelTrace

NUM_STEPS = 2


def simulate(
    trace: ModelTrace,
    request: Request,
    strategy: Strategy,
    *,
    world_size: int,
    rank: int,
    accumulates: bool,
    kind: DeviceKind,
) -> RankMemory:
    """The memory of `rank` under `strategy`, as `frugal.dryrun.rehearse` would record it."""
    stream = Stream(trace.stream.names)
    setting = Setting(
        zero_stage=strategy.zero_stage,
        elements=trace.trainable_elements,
        element_bytes=trace.element_bytes,
        bucket_elements=strategy.reduce_bucket_elements,
        optimizer=request.optimizer,
        world_size=world_size,
        rank=rank,
    )
    optimizer = Replicated(stream, setting) if strategy.zero_stage == 0 else Partitioned(stream, setting)
    stream.phase("initialisation")
    arrived = [stream.born(n * trace.element_bytes, "to device", PARAMETERS) for n in trace.elements]
    for size_bytes in trace.buffer_bytes:
        stream.born(size_bytes, "to device", PARAMETERS)
    optimizer.initialise([storage for storage, trained in zip(arrived, trace.trainable, strict=True) if trained])
    for _ in range(NUM_STEPS):
        _accumulate(stream, trace, optimizer, 2 if accumulates else 1, kind)
        stream.phase("optimizer step")
        optimizer.step()
    return RankMemory(rank=rank, timeline=stream.timeline(), host_bytes=0)


def _accumulate(
    stream: Stream, trace: ModelTrace, optimizer: Partitioned | Replicated, num_steps: int, kind: DeviceKind
) -> None:
    """Forward and backward of the micro-steps; on a CPU all batches are there from the beginning."""
    steps = [MicroStep(stream, trace) for _ in range(num_steps)]
    for step in steps if kind == "cpu" else steps[:1]:
        step.play(ARRIVAL)
    for i, step in enumerate(steps):
        if i and kind != "cpu":
            step.play(ARRIVAL)
            steps[i - 1].play(END)
        stream.phase("forward")
        step.play("forward")
        stream.phase("backward")
        optimizer.begin(is_boundary=i == num_steps - 1)
        step.play("backward", optimizer)
        optimizer.end()
    for step in steps if kind == "cpu" else steps[-1:]:
        step.play(END)
