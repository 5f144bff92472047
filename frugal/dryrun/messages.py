"""Messages between client and worker, pickled: questions, and those of their answers that are of dry runs.

Plain data: no torch here.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from frugal.config.hardware.cluster import ASSUMED_CAPABILITY, Capability, DeviceKind
from frugal.config.request import Request
from frugal.planning.cost import Counts
from frugal.planning.memory.timeline import ModelTrace, Peak, Timeline
from frugal.planning.strategy import ActivationCheckpointing, Kernels, Strategy


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The recording of one rank over two optimizer steps of equal micro-steps.

    `timeline` has the sizes of this `micro_batch`. `counts` are those of one micro-step. `host_bytes` is the peak of
    the rank's tensors on its host.
    `notes`: assumptions where memory depends on data, see `frugal.dryrun.trace.operators`.
    """

    timeline: Timeline
    micro_batch: int
    host_bytes: int
    counts: Counts
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Peak:
        """Return the moment with the most live bytes."""
        return self.timeline.peak(self.micro_batch)

    @property
    def phases(self) -> dict[str, int]:
        """Return the peak of each phase in bytes."""
        return self.timeline.phase_peaks(self.micro_batch)

    def explain(self, category: str) -> list[tuple[str, int]]:
        """Return the modules (dotted names) that hold a category's bytes at the peak, the largest first."""
        return self.timeline.holders(self.micro_batch, category)


class AskFacts(msgspec.Struct, frozen=True):
    """A question for the facts of the request's model, a `ModelFacts` without notes."""

    request: Request


class AskCheck(msgspec.Struct, frozen=True):
    """A question for notes on the request's model before it is trained, a tuple of texts."""

    request: Request


class AskFused(msgspec.Struct, frozen=True):
    """A question for the modules of the request's model that fused kernels can run, see `ModelFacts.fused`."""

    request: Request


class AskDryRun(msgspec.Struct, frozen=True, kw_only=True):
    """A question for the `DryRun` of one rank under a strategy.

    `capability`: of a `cuda` device; `resident_threads`: that it holds at once, 0 leaves out their memory.
    `multiprocessors`: of the device; only fused kernels depend on them.
    `first_micro_steps`: micro-steps of the first optimizer step, if not as many as in the second. It only sets the
    stage for the second, so one of them is enough where time counts: a test holds that the peaks are the same.
    `by_tensor`: whether weights come one by one, otherwise a CPU rank holds them all before they are split.
    """

    request: Request
    strategy: Strategy
    micro_batch: int
    accumulation_steps: int
    world_size: int
    rank: int
    kind: DeviceKind
    capability: Capability = ASSUMED_CAPABILITY
    resident_threads: int = 0
    multiprocessors: int = 1
    first_micro_steps: int | None = None
    by_tensor: bool = False


class AskTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A question for the trace of one step of the model alone, for any micro-batch: a `Traced`.

    `zero_stage`: 3, or 2 for all others.

    `capability`: of a `cuda` device. `sequence_parallel`: ranks that share each sample. `multiprocessors`: of the
    device, where `kernels` are fused.
    """

    request: Request
    kind: DeviceKind
    activation_checkpointing: ActivationCheckpointing = "off"
    loss: Literal["plain", "tiled"] = "plain"
    mlp: Literal["plain", "tiled"] = "plain"
    zero_stage: Literal[2, 3] = 2
    capability: Capability = ASSUMED_CAPABILITY
    sequence_parallel: int = 1
    kernels: Kernels = "plain"
    multiprocessors: int = 1


Question = AskFacts | AskCheck | AskFused | AskDryRun | AskTrace


class Traced(msgspec.Struct, frozen=True):
    """The trace, or None if the model's memory is no affine function of the micro-batch."""

    trace: ModelTrace | None
