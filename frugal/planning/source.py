"""What a search asks of whoever knows the model: rehearsals, or formulas in their place."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from frugal.planning import cost
from frugal.planning.cluster import Cluster, Device
from frugal.planning.memory import MemoryBreakdown
from frugal.planning.request import Request
from frugal.planning.strategy import Strategy


class Facts(Protocol):
    """What is known of a model before it runs, in elements.

    `max_positions`: tokens it can read, None: any number. `can_recompute`: whether it takes activation checkpointing,
    `can_tile`: whether it takes the tiled loss.
    """

    @property
    def task(self) -> str: ...
    @property
    def parameters(self) -> int: ...
    @property
    def trainable_parameters(self) -> int: ...
    @property
    def largest_parameter(self) -> int: ...
    @property
    def max_positions(self) -> int | None: ...
    @property
    def can_recompute(self) -> bool: ...
    @property
    def can_tile(self) -> bool: ...


class Profile(cost.Model, Protocol):
    """What one model costs under one strategy, for any micro-batch. `draft`: without the allocator's part."""

    @property
    def draft(self) -> "Profile": ...
    def memory(self, micro_batch: int, device: Device) -> MemoryBreakdown: ...
    def largest_micro_batch(self, device: Device, cap: int) -> int: ...


class Source(Protocol):
    """Where profiles come from. `accumulates`: whether there is more than one micro-step.

    `prepare` is told what will be asked for. `draft` is a profile without the allocator's part, found by arithmetic;
    None where only a rehearsal could tell. `distrust` has a strategy profiled by rehearsals from now on; false if it
    already is. `notes`: what the last rehearsal assumed, where memory depends on the data.
    """

    @property
    def notes(self) -> tuple[str, ...]: ...
    def facts(self) -> Facts: ...
    def prepare(self, strategies: Sequence[Strategy]) -> None: ...
    def draft(self, strategy: Strategy, accumulates: bool) -> Profile | None: ...
    def distrust(self, strategy: Strategy) -> bool: ...
    def profile(self, strategy: Strategy, accumulates: bool) -> Profile: ...
    def rehearse(
        self, strategy: Strategy, micro_batch: int, accumulation_steps: int, device: Device | None = None
    ) -> MemoryBreakdown: ...


Rehearse = Callable[[Request, Cluster], AbstractContextManager[Source]]
"""A source for one request on one cluster, open while the context lasts."""
