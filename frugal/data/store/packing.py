"""Several documents in one sample; `frugal.models.packs` keeps them from seeing each other."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_OPEN = 256
"""Packs that are filled at the same time. Python's standard library fills them to 99.3 % or more, from 64 on."""


Piece = tuple[NDArray[np.int32], NDArray[np.bool_] | None]
"""Tokens, and which of them are trained on; None: all."""


class Packer:
    """Puts pieces into packs of at most `seq_len` tokens, each into the fullest open one that it fits into.

    Best fit (https://doi.org/10.1137/0203025) with a limit on what is open: what comes out depends on the pieces and
    their order alone, and memory does not grow with their number.
    """

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self._open: list[tuple[int, int, list[Piece]]] = []  # free tokens, number, pieces; fullest first
        self._number = 0

    def add(self, piece: NDArray[np.int32], trained: NDArray[np.bool_] | None = None) -> Iterator[dict[str, Any]]:
        """Take one more piece, of which `trained` tokens are trained on (None: all). Yield the packs full by it."""
        index = bisect_left(self._open, (len(piece), -1), key=lambda pack: pack[:2])
        if index < len(self._open):
            free, number, pieces = self._open.pop(index)
        else:
            free, number, pieces = self.seq_len, self._number, []
            self._number += 1
        free -= len(piece)
        pieces.append((piece, trained))
        if free < 2:  # one token alone teaches nothing
            yield _pack(pieces)
        else:
            index = bisect_left(self._open, (free, number), key=lambda pack: pack[:2])
            self._open.insert(index, (free, number, pieces))
            if len(self._open) > MOST_OPEN:
                yield _pack(self._open.pop(0)[2])

    def flush(self) -> Iterator[dict[str, Any]]:
        """Yield the packs that are still open, in the order in which they were begun."""
        for _, _, pieces in sorted(self._open, key=lambda pack: pack[1]):
            yield _pack(pieces)
        self._open.clear()


def _pack(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return a sample of several documents: `documents` has the number of tokens of each."""
    documents = np.array([len(piece) for piece, _ in pieces], dtype=np.int32)
    tokens = np.concatenate([piece for piece, _ in pieces])
    trained = np.concatenate([np.ones(len(piece), bool) if mask is None else mask for piece, mask in pieces])
    return {"input_ids": tokens, "documents": documents, "trained": trained, "length": len(tokens)}
