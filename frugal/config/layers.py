"""A mode of activation checkpointing for each layer, as a user pins them, and a tiled MLP.

frugal plan --activation-checkpointing full:0-19,off:20-31
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, get_args

import msgspec

from frugal.errors import RequestError, refuse

LayerMode = Literal["off", "selective", "full", "offloaded"]
"""Modes of activation checkpointing."""

FLAG = "--activation-checkpointing"
_WRONG = f"{FLAG} does not give each layer one mode"
_HINT = f"write {FLAG} full:0-19,off:20-31, counted from 0"
MOST_LAYERS = 10_000
_WORD = re.compile(r"(\w+)\s*:\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?", re.ASCII)


@dataclass(frozen=True)
class LayerModes:
    """The mode of every layer, in the order in which they run.

    Attributes:
        runs: modes and how many layers in a row have each, as `plan.json` says it: `(("full", 20), ("off", 12))`.
    """

    runs: tuple[tuple[LayerMode, int], ...]

    def __post_init__(self) -> None:
        unknown = next((f"`{mode}`" for mode, _ in self.runs if mode not in get_args(LayerMode)), "")
        empty = next((mode for mode, count in self.runs if count < 1), "")
        refuse(
            (unknown, _WRONG, f"{unknown} is no mode: there are {', '.join(get_args(LayerMode))}", _HINT),
            (empty, _WRONG, f"{empty} has no layers, and 1 is the least", _HINT),
            (
                not 1 <= self.num_layers <= MOST_LAYERS,
                _WRONG,
                f"it names {self.num_layers} layers; there may be 1 to {MOST_LAYERS}",
                _HINT,
            ),
        )

    @classmethod
    def of(cls, value: "str | Iterable[Any] | LayerModes") -> "LayerModes":
        """Return the modes that a flag, frugal.toml or a caller names: runs as in `plan.json`, or text such as
        `full:0-19,off:20-31`: a mode, and the first and the last layer that have it, counted from 0.

        Raises:
            RequestError: not every layer has exactly one mode.
        """
        if isinstance(value, LayerModes):
            return value
        if isinstance(value, str):
            runs = _parsed(value)
        else:
            try:
                runs = msgspec.convert(value, list[tuple[str, int]])
            except msgspec.ValidationError:
                because, hint = "runs are pairs of a mode and a whole number of layers", '[["full", 20], ["off", 12]]'
                raise RequestError(_WRONG, because=because, hint=f"write {hint}") from None
        joined = ((mode, sum(count for _, count in run)) for mode, run in groupby(runs, key=itemgetter(0)))
        return cls(tuple(joined))

    @property
    def num_layers(self) -> int:
        """Layers of all runs."""
        return sum(count for _, count in self.runs)

    def __str__(self) -> str:
        words, first = [], 0
        for mode, count in self.runs:
            words.append(f"{mode}:{first}" + (f"-{first + count - 1}" if count > 1 else ""))
            first += count
        return ",".join(words)


def _parsed(text: str) -> list[tuple[str, int]]:
    """Return the mode of each layer, in their order."""
    modes: dict[int, str] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        match = _WORD.fullmatch(word)
        if match is None or not int(match[2]) <= (last := int(match[3] or match[2])) < MOST_LAYERS:
            raise RequestError(
                _WRONG, because=f"`{word}` is no mode with the numbers of layers, below {MOST_LAYERS}", hint=_HINT
            )
        for layer in range(int(match[2]), last + 1):
            refuse((layer in modes, _WRONG, f"layer {layer} has two modes", _HINT))
            modes[layer] = match[1]
    if missing := set(range(len(modes))) - modes.keys():
        raise RequestError(_WRONG, because=f"layer {min(missing)} has no mode", hint=_HINT)
    return [(modes[layer], 1) for layer in range(len(modes))]
