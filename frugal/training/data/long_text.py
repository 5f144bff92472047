"""Texts of many MB, decoded and tokenised in pieces, so that a line of 100 MB takes little more than its bytes.

Decoded at once, one emoji makes each character four bytes; a tokenizer takes a hundred bytes a token. A text is cut
where its tokens are those of the whole: at such a place both sides together and each alone, with some context, give the
same ones. Where there is no such place, the piece grows.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

PIECE_BYTES = 1 << 20
"""Of what is decoded and tokenised at once. A text of more bytes is long."""

_TOKENISED = 1 << 15  # characters at once
_CONTEXT = 256  # characters on each side of a cut
_TRIES = 64  # places, of each kind


class LongText:
    """A text as it stands in a file: UTF-8, or the inside of a JSON string. It can be taken once."""

    def __init__(self, raw: bytes | memoryview, *, is_json: bool) -> None:
        self._raw = memoryview(raw)
        self._is_json = is_json

    def __reduce__(self) -> tuple[Any, ...]:
        """As bytes, which can be pickled."""
        return _rebuilt, (bytes(self._raw), self._is_json)

    def __len__(self) -> int:
        """Bytes in the file."""
        return len(self._raw)

    def check(self) -> None:
        """Whether it can be decoded.

        Raises:
            ValueError: it cannot; UnicodeDecodeError, with `start` in the whole, where it is no UTF-8.
        """
        for _ in self._pieces():
            pass

    def take(self) -> Iterator[str]:
        """Its text in pieces. Afterwards its bytes are gone, whoever still holds it. Raises as `check`."""
        yield from self._pieces()
        self._raw = memoryview(b"")

    def _pieces(self) -> Iterator[str]:
        start = 0
        while start < len(self._raw):
            piece = bytes(self._raw[start : start + PIECE_BYTES])
            if start + len(piece) < len(self._raw):
                piece = piece[: _end(piece, is_json=self._is_json)]
            try:
                yield msgspec.json.decode(b'"%b"' % piece, type=str) if self._is_json else piece.decode()
            except UnicodeDecodeError as error:
                error.start += start - self._is_json
                raise
            start += len(piece)


def _end(piece: bytes, *, is_json: bool) -> int:
    """Where to cut, near the end: not within a character's bytes, an escape, or a pair of surrogates."""
    end = len(piece)
    if is_json:
        slash = piece.rfind(b"\\", end - 6)
        is_escape = slash >= 0 and _starts_escape(piece, slash)
        if is_escape and slash + (6 if piece[slash + 1 : slash + 2] in (b"u", b"") else 2) > end:
            end = slash
        if _HIGH_SURROGATE.fullmatch(piece, end - 6, end) and _starts_escape(piece, end - 6):
            end -= 6
    for back in range(1, 4 if end == len(piece) else 1):
        if piece[end - back] < 0x80:
            break
        if piece[end - back] >= 0xC0:  # the first byte of a character, which says how many it has
            length = 2 if piece[end - back] < 0xE0 else 3 if piece[end - back] < 0xF0 else 4
            return end - back if length > back else end
    return end


def _rebuilt(raw: bytes, is_json: bool) -> LongText:
    return LongText(raw, is_json=is_json)


def _starts_escape(piece: bytes, slash: int) -> bool:
    """Whether this backslash is not escaped itself."""
    before = piece[: slash + 1]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]..", re.DOTALL)  # the first half of a pair such as \ud83d\ude80


def cut_for(encode: Callable[[str], Sequence[int]], pieces: Iterator[str]) -> Iterator[str]:
    """The same text, cut where the tokens that `encode` gives of the parts are those of the whole."""
    rest = ""
    for piece in (each[start : start + _TOKENISED] for each in pieces for start in range(0, len(each), _TOKENISED)):
        rest += piece
        cut = _cut(encode, rest) if len(rest) > 4 * _CONTEXT else None
        if cut is not None:
            end, start = cut
            yield rest[:end]
            rest = rest[start:]
    if rest:
        yield rest


def _cut(encode: Callable[[str], Sequence[int]], text: str) -> tuple[int, int] | None:
    """Where a part may end, and where the next one begins: behind a space, where a tokenizer puts one there itself."""
    last = len(text) - _CONTEXT
    nearby = range(last, max(_CONTEXT, last - 100 * _TRIES), -1)
    spaces = [place for place in nearby if text[place].isspace()][:_TRIES]
    for place in chain(spaces, nearby[:_TRIES]):
        left, right = text[place - _CONTEXT : place], text[place : place + _CONTEXT]
        whole = list(encode(left + right))
        for skipped in (0, 1) if text[place].isspace() else (0,):
            if whole == [*encode(left), *encode(right[skipped:])]:
                return place, place + skipped
    return None
