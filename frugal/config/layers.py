"""A mode of activation checkpointing for each layer, as a user pins them, and a tiled MLP.

frugal plan --activation-checkpointing full:0-19,off:20-31
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, get_args

from frugal.errors import RequestError, refuse

if TYPE_CHECKING:
    from frugal.config.request import Request

LayerMode = Literal["off", "selective", "full", "offloaded"]
"""Modes of activation checkpointing."""

FLAG = "--activation-checkpointing"
FORM = f"{FLAG} full:0-19,off:20-31"
MOST_LAYERS, MOST_DIGITS = 10_000, 9


@dataclass(frozen=True)
class LayerModes:
    """The mode of every layer, in the order in which they run.

    Attributes:
        runs: modes and how many layers in a row have each, as `plan.json` says it: `(("full", 20), ("off", 12))`.
    """

    runs: tuple[tuple[LayerMode, int], ...]

    def __post_init__(self) -> None:
        if not self.runs:
            raise _wrong("it names no layer")
        for mode, count in self.runs:
            _check_run(mode, count)
        if self.num_layers > MOST_LAYERS:
            raise _wrong(f"it names {self.num_layers} layers, and {MOST_LAYERS} are the most")

    @classmethod
    def of(cls, value: "str | Iterable[Any] | LayerModes") -> "LayerModes":
        """Return the modes that a flag, frugal.toml or a caller names: text as for `parse`, or runs as in `plan.json`.

        Raises:
            RequestError: it does not say the mode of every layer once.
        """
        if isinstance(value, LayerModes):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        runs = list(value)
        if not all(isinstance(run, Sequence) and not isinstance(run, str) and len(run) == 2 for run in runs):
            raise _wrong("runs are pairs of a mode and a number of layers", hint='write [["full", 20], ["off", 12]]')
        return cls(_merged((mode, count) for mode, count in runs))

    @classmethod
    def parse(cls, text: str) -> "LayerModes":
        """Parse `full:0-19,off:20-31`: a mode, and the first and the last layer that have it, counted from 0.

        Raises:
            RequestError: it does not say the mode of every layer once.
        """
        ranges = sorted(map(_range, filter(None, (word.strip() for word in text.split(",")))))
        expected = 0
        for first, last, _ in ranges:
            if first > expected:
                raise _wrong(f"{_layers(expected, first - 1)} no mode")
            if first < expected:
                raise _wrong(f"{_layers(first, min(last, expected - 1))} two modes")
            expected = last + 1
        return cls(_merged((mode, last + 1 - first) for first, last, mode in ranges))

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


def _range(word: str) -> tuple[int, int, Any]:
    """Return the first and the last layer, and their unchecked mode."""
    mode, is_given, numbers = (part.strip() for part in word.partition(":"))
    first, has_last, last = (part.strip() for part in numbers.partition("-"))
    last = last if has_last else first
    if not is_given or not all(number.isdecimal() and len(number) <= MOST_DIGITS for number in (first, last)):
        raise _wrong(f"`{word}` is no mode with the numbers of layers")
    if int(last) < int(first):
        raise _wrong(f"`{word}` ends before it begins")
    return int(first), int(last), mode


def _layers(first: int, last: int) -> str:
    return f"layer {first} has" if first == last else f"layers {first} to {last} have"


def _check_run(mode: Any, count: Any) -> None:
    if mode not in get_args(LayerMode):
        raise _wrong(f"`{mode}` is no mode: there are {', '.join(get_args(LayerMode))}")
    if type(count) is not int or count < 1:
        raise _wrong(f"{mode} has {count!r} layers, which must be a whole number, at least 1")


def _merged(runs: Iterable[tuple[Any, Any]]) -> tuple[tuple[LayerMode, int], ...]:
    """Join adjacent runs of one mode."""
    checked = list(runs)
    for run in checked:
        _check_run(*run)
    return tuple((mode, sum(count for _, count in run)) for mode, run in groupby(checked, key=itemgetter(0)))


def _wrong(because: str, hint: str = f"write {FORM}, counted from 0") -> RequestError:
    return RequestError(f"{FLAG} does not give each layer one mode", because=because, hint=hint)


def check(request: "Request") -> None:
    """Check that a tiled MLP is possible with the other pins.

    Raises:
        RequestError: it is not.
    """
    modes, mode = request.layer_modes, request.activation_checkpointing
    if request.mlp != "tiled":
        return
    refuse(
        (
            mode == "selective" or (modes is not None and "selective" in dict(modes.runs)),
            f"--mlp tiled is impossible with {FLAG} {modes or mode}",
            "selective keeps the products of all slices until backward",
            "leave one of them out",
        ),
        (
            request.offload == "nvme",
            "--mlp tiled is impossible with --offload nvme",
            "an MLP's parameters are gathered all at once, for which there may be too few buffers",
            "leave one of them out",
        ),
    )
