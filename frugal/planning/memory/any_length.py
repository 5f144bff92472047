"""The storages of a micro-step for samples of any length, from the traces of two lengths.

A trace is affine in the micro-batch at one length. Of what grows with the length, most is proportional to it and some
to its square (masks, and scores where attention has no kernel of its own); the rest is constant. Two traces tell which
of the three a part is; what is none of them, a few bytes of embeddings, is put on the line through both.

Where other lengths are another stream, as of a tiled loss with fewer slices, or of a model that cannot read samples so
short, there is one trace, and all that grows with the micro-batch is taken to be proportional to the length. That is
too much for squares, and too little where short samples are cut into fewer slices (7 % of all, with a small vocabulary)
or padded (66 %, to 512 tokens). The dry run of many of the shortest samples, with which a plan is proven, is not.

Left out: kernels that round lengths up, by less than a tile for each sample.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from frugal.planning.memory.timeline import ModelTrace, NotAffineError, check_aligned


@dataclass(frozen=True, kw_only=True)
class AnyLength:
    """A micro-step of any number of samples of any length.

    Attributes:
        short: its trace at the first of `lengths`, tokens; None: not the stream of the other.
        long: at the second.
    """

    short: ModelTrace | None
    long: ModelTrace
    lengths: tuple[int, int]

    def __post_init__(self) -> None:
        """Check that both are one stream.

        Raises:
            NotAffineError: they are not.
        """
        if self.short is None:
            return
        check_aligned(self.short.stream, self.long.stream, *(f"{length} tokens" for length in self.lengths))
        if self.short.marks != self.long.marks:
            raise NotAffineError("gradients are finished in another order at another length")

    def sizes(self, samples: int, length: int) -> list[int]:
        """Return the bytes of every storage for `samples` of `length` tokens."""
        fixed, per_sample = (part @ [1, length, length * length] for part in self._parts)
        return [max(0, round(size)) for size in (fixed + samples * per_sample).tolist()]

    @cached_property
    def _parts(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Fixed bytes, and those for each sample: a constant, a part for each token, one for each pair of tokens."""

        def split(short: tuple[int, ...], long: tuple[int, ...]) -> npt.NDArray[np.float64]:
            a, b = self.lengths
            first, second = np.asarray(short, dtype=np.float64), np.asarray(long, dtype=np.float64)
            slope = (second - first) / (b - a)
            parts = np.stack([first - slope * a, slope, np.zeros_like(slope)], axis=1)
            is_square = (first != second) & (first * b * b == second * a * a)
            parts[is_square] = np.stack([0 * slope, 0 * slope, second / (b * b)], axis=1)[is_square]
            return parts

        if self.short is None:
            stream, zeros = self.long.stream, np.zeros(len(self.long.stream.fixed))
            per_token = np.asarray(stream.per_sample) / self.lengths[1]
            return np.stack([stream.fixed, zeros, zeros], axis=1), np.stack([zeros, per_token, zeros], axis=1)
        one, other = self.short.stream, self.long.stream
        return split(one.fixed, other.fixed), split(one.per_sample, other.per_sample)
