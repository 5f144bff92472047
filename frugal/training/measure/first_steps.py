"""Memory of a run's first steps, and the largest micro-batch that was run in them."""

import math
from contextlib import ExitStack

from frugal.training.measure.memory_watch import Gauge


class FirstStepsGauge:
    """Measures memory until everything that a plan counts was allocated once, then costs nothing."""

    def __init__(self, gauge: Gauge, stack: ExitStack) -> None:
        self._gauge = gauge
        self._stack = stack
        self._num_steps = 0
        self.largest: tuple[int, int] | None = None  # samples and tokens of the largest micro-batch so far

    def after_step(self, largest: tuple[int, int] | None) -> int:
        """A global batch was run whose largest micro-batch has this size; the steps so far."""
        self.largest = max(filter(None, (self.largest, largest)), key=math.prod, default=None)
        self._num_steps += 1
        return self._num_steps

    def stop(self) -> int:
        """The peak so far, bytes; from here on nothing is measured."""
        peak = self._gauge.peak_bytes
        self._stack.close()
        return peak
