"""Without ZeRO (deepspeed/runtime/engine.py): every rank has everything, and torch's optimizer is called as it is."""

from frugal.planning.timeline import GRADIENTS, OPTIMIZER
from frugal.planning.zero.setting import Setting
from frugal.planning.zero.stream import Stream

REDUCED_TOGETHER = 500_000_000
"""Gradient elements that the engine concatenates for one all-reduce (engine.py:151)."""


class Replicated:
    """The optimizer of one rank at ZeRO stage 0, in fp32."""

    def __init__(self, stream: Stream, setting: Setting) -> None:
        self._stream = stream
        self._setting = setting
        self._is_boundary = True
        self._gradients: dict[int, int] = {}  # parameter -> storage
        self._has_states = False

    def begin(self, *, is_boundary: bool) -> None:
        """A backward begins; `is_boundary`: the optimizer step comes after it."""
        self._is_boundary = is_boundary

    def gradient(self, parameter: int, storage: int) -> None:
        """See `Optimizer`. Later micro-steps are added in place."""
        if parameter not in self._gradients:
            self._stream.hold(storage)
            self._stream.relabel(storage, GRADIENTS)
            self._gradients[parameter] = storage

    def module(self, what: int, number: int, hold: int) -> None:
        """Modules have their parameters at hand."""

    def end(self) -> None:
        """Backward is over: gradients are all-reduced, several in one (engine.py:3828)."""
        if not self._is_boundary:
            return
        group: list[int] = []
        for n in self._setting.elements:
            group.append(n)
            if sum(group) > REDUCED_TOGETHER:
                self._reduce(group)
                group = []
        self._reduce(group)

    def _reduce(self, group: list[int]) -> None:
        if len(group) > 1:
            self._stream.flash(sum(group) * self._setting.element_bytes, "aten.cat.default")

    def step(self) -> None:
        """The optimizer step: states are made at the first."""
        if not self._has_states:
            for parameter in self._gradients:
                for _ in range(self._setting.num_states):
                    size_bytes = self._setting.elements[parameter] * self._setting.element_bytes
                    self._stream.born(size_bytes, "aten.zeros_like.default", OPTIMIZER)
            self._has_states = True
        for storage in self._gradients.values():
            self._stream.release(storage)
        self._gradients.clear()
