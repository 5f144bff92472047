"""What client and worker say to each other: one of these as JSON a line."""

import msgspec

from frugal.dryrun.rehearsal import ModelFacts, Rehearsal
from frugal.planning.profile import DeviceKind
from frugal.planning.request import Request
from frugal.planning.strategy import Strategy


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


Question = Describe | Rehearse


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
    mistake: Mistake | None = None
    crash: str | None = None
