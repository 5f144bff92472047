"""Files that are wrong in every way: bytes that were changed, and values nobody would write."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.5, 1e-300, 1e308, float("nan"),
    float("inf"), "", " ", "0", "12G", "-1G", "nan", "x" * 5000, "\u0000", "\ud83d\ude80", "../../etc/passwd",
    "/dev/zero", "file.py:f", "a.b:c", "%s%n", "[bold]", [], {}, [[]], [None], [0], ["a", 1], {"": ""},
)  # fmt: skip
BYTES = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n\n", b'"',
    b"{", b"]", b"'", b"=", b"#", b"\\", b"\xc3", b"9" * 400,
)  # fmt: skip
DEEP = b"[" * 200_000


def bytes_like(good: bytes, number: int, *, seed: int = 0) -> Iterator[bytes]:
    """`number` texts like `good` with bytes cut off, turned, put in, left out or doubled; empty and deep ones too."""
    chosen = random.Random(seed)
    yield from (b"", b"\x00" * 100, DEEP, good + DEEP, good[::-1], good.decode().encode("utf-16"), b'{"a": ' * 200_000)
    for _ in range(number - 7):
        text = bytearray(good)
        for _ in range(chosen.choice((1, 1, 2, 5, 20))):
            place, end = sorted(chosen.randrange(len(text) + 1) for _ in range(2))
            match chosen.randrange(6):
                case 0:
                    del text[place:]
                case 1:
                    del text[place : min(end, place + 30)]
                case 2:
                    text[place:place] = chosen.choice(BYTES)
                case 3 if place < len(text):
                    text[place] ^= 1 << chosen.randrange(8)
                case 4:
                    text[place:place] = text[place : min(end, place + 200)]
                case _:
                    text[place:end] = text[place:end][::-1]
        yield bytes(text)


def documents_like(good: Any, number: int, *, seed: int = 0) -> Iterator[Any]:
    """`number` documents like `good` in which values anywhere are replaced, dropped, doubled or given other names."""
    chosen = random.Random(seed)
    for _ in range(number):
        holder = [copy.deepcopy(good)]
        for _ in range(chosen.choice((1, 1, 1, 2, 3))):
            places = list(_places(holder))
            inside, key = chosen.choice(places)
            if key not in (inside if isinstance(inside, dict) else range(len(inside))):
                continue
            kind = chosen.randrange(8)
            if kind < 5:
                inside[key] = copy.deepcopy(chosen.choice(VALUES))
            elif kind == 5 and inside is not holder:
                del inside[key]
            elif kind == 6 and isinstance(inside, dict):
                inside[chosen.choice(("", "surplus", key + "_", key.upper()))] = inside[key]
            elif isinstance(inside[key], int | float) and not isinstance(inside[key], bool):
                inside[key] = chosen.choice((-inside[key], inside[key] * 1000, inside[key] + 1, str(inside[key])))
        yield holder[0]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the places of values in a document: the container of each, and its key."""
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(inner)


def json_like(
    good: Any, number: int, *, seed: int = 0, after: Callable[[Any], Any] = lambda value: value
) -> Iterator[bytes]:
    """`number` texts: half like the JSON of `good`, half with its values changed, and then as `after` makes them."""
    yield from bytes_like(json.dumps(good, indent=1).encode(), number // 2, seed=seed)
    for document in documents_like(good, number - number // 2, seed=seed):
        yield json.dumps(after(document)).encode("utf-8", "surrogatepass")
