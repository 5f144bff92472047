"""What client and worker say to each other: one of these as JSON a line."""

from typing import Literal

import msgspec

from frugal.dryrun.rehearsal import ModelFacts, Rehearsal
from frugal.planning.profile import DeviceKind
from frugal.planning.request import Request
from frugal.planning.strategy import ActivationCheckpointing, Strategy
from frugal.planning.zero.trace import ModelTrace


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """What is the request's model?"""

    request: Request


class Rehearse(msgspec.Struct, frozen=True, tag="rehearse", kw_only=True):
    """What does this rank do under this strategy?"""

    request: Request
    strategy: Strategy
    micro_batch: int
    accumulation_steps: int
    world_size: int
    rank: int
    kind: DeviceKind
    first_micro_steps: int | None = None


class Trace(msgspec.Struct, frozen=True, tag="trace", kw_only=True):
    """What does one step of the model alone do, for any micro-batch? `zero_stage`: 3, or 2 for all others."""

    request: Request
    activation_checkpointing: ActivationCheckpointing
    loss: Literal["plain", "tiled"]
    zero_stage: Literal[2, 3]
    kind: DeviceKind


class WarmUp(msgspec.Struct, frozen=True, tag="warm-up"):
    """A rehearsal will be asked for: make ready for it."""


Question = Describe | Rehearse | Trace | WarmUp


class Traced(msgspec.Struct, frozen=True):
    """The trace; None: the model's memory is no affine function of the micro-batch."""

    trace: ModelTrace | None


class Mistake(msgspec.Struct, frozen=True):
    """A `FrugalError`, by the name of its class."""

    kind: str
    what: str
    because: tuple[str, ...]
    hint: str | None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One of its fields. `crash` is a traceback: our bug, or an exception in the user's model."""

    describe: ModelFacts | None = None
    rehearse: Rehearsal | None = None
    traced: Traced | None = None
    mistake: Mistake | None = None
    crash: str | None = None
