"""A seeded order of any number of samples, in constant memory.

`permutation(n, seed, epoch)[i]` says which sample is drawn i-th in an epoch. Nothing is stored: a Feistel network
(https://doi.org/10.1137/0217022) permutes the numbers below the next power of two of n, and cycle walking
(https://doi.org/10.1007/3-540-45760-7_9, section 3: apply it again until the result is below n) makes that a
permutation of the n. Fewer than two applications are expected. The round function is splitmix64's finaliser
(https://doi.org/10.1145/2714064.2660195). Good enough for shuffling, useless as a cipher. The halves of small
numbers have too few bits to be mixed well, so up to `_TABLE` samples are sorted by a hash instead.
"""

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 8  # measured: with 8, n = 5 to 10 are visibly not uniform, n >= 16 are; the table leaves a wide margin
_TABLE = 1 << 12  # samples, 32 KiB
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def permutation(n: int, seed: int, epoch: int) -> "Permutation":
    """The order of `n` samples in one epoch. Another seed or epoch is another order."""
    return Permutation(n, seed, epoch)


class Permutation:
    """A bijection of the numbers 0 to n - 1; an int gives an int, a slice or an array of places gives an array."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        assert n >= 1
        self._n = n
        num_bits = (n - 1).bit_length()
        self._low_bits = (num_bits + 1) // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (num_bits // 2)) - 1
        state = _mix((_mix(seed & _MASK) + epoch) & _MASK)
        self._table: NDArray[np.int64] | None = None
        if n <= _TABLE:
            self._table = np.argsort(_mix(np.arange(n, dtype=np.uint64) * _GOLDEN + state), kind="stable")
        self._keys = tuple(_mix((state + (i + 1) * _GOLDEN) & _MASK) for i in range(_NUM_ROUNDS))

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice | NDArray[Any]) -> NDArray[np.int64]: ...
    def __getitem__(self, place: int | slice | NDArray[Any]) -> int | NDArray[np.int64]:
        if isinstance(place, int):
            if not -self._n <= place < self._n:
                raise IndexError(place)
            if self._table is not None:
                return int(self._table[place])
            value = self._step(place % self._n)
            while value >= self._n:
                value = self._step(value)
            return value
        places = np.arange(*place.indices(self._n)) if isinstance(place, slice) else np.asarray(place)
        if self._table is not None:
            return self._table[places]
        values = self._step(places.astype(np.uint64))
        outside = np.flatnonzero(values >= self._n)
        while len(outside):
            values[outside] = self._step(values[outside])
            outside = outside[values[outside] >= self._n]
        return values.astype(np.int64)

    def _step(self, value: Any) -> Any:
        """One pass through the network: an int, or each element of a uint64 array."""
        high, low = value >> self._low_bits, value & self._low_mask
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                high = high ^ (_mix((low + key) & _MASK) & self._high_mask)
            else:
                low = low ^ (_mix((high + key) & _MASK) & self._low_mask)
        return (high << self._low_bits) | low


def _mix(value: Any) -> Any:
    """splitmix64's finaliser on 64 bits: an int, or each element of a uint64 array."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
