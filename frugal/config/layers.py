"""What layers do: the modes of activation checkpointing that a user gives them, and what a tiled MLP does not go with.

frugal plan --layer-modes full:0-19,off:20-31
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, get_args

from frugal.errors import RequestError

LayerMode = Literal["off", "selective", "full", "offloaded"]
"""What may become of a layer's activations."""

FLAG = "--layer-modes"
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
        """What a flag, frugal.toml or a caller says: text as for `parse`, or runs as in `plan.json`.

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
        """`full:0-19,off:20-31`: a mode and the numbers of the first and the last layer that has it, counted from 0.

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
        """Of all runs."""
        return sum(count for _, count in self.runs)

    def __str__(self) -> str:
        words, first = [], 0
        for mode, count in self.runs:
            words.append(f"{mode}:{first}" + (f"-{first + count - 1}" if count > 1 else ""))
            first += count
        return ",".join(words)


def _range(word: str) -> tuple[int, int, Any]:
    """First and last layer, and their mode; whether that is one is checked later."""
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
        raise _wrong(f"{mode} is that of {count!r} layers, which must be a whole number, at least 1")


def _merged(runs: Iterable[tuple[Any, Any]]) -> tuple[tuple[LayerMode, int], ...]:
    """Runs of one mode that follow each other are one."""
    checked = list(runs)
    for run in checked:
        _check_run(*run)
    return tuple((mode, sum(count for _, count in run)) for mode, run in groupby(checked, key=itemgetter(0)))


def _wrong(because: str, hint: str = f"write {FORM}, counted from 0") -> RequestError:
    return RequestError(f"{FLAG} does not give each layer one mode", because=because, hint=hint)


def check_modes(modes: LayerModes | None, activation_checkpointing: str) -> None:
    """`--layer-modes` beside `--activation-checkpointing`.

    Raises:
        RequestError: the two contradict each other.
    """
    if modes is not None and activation_checkpointing not in ("auto", "budget"):
        raise RequestError(
            f"{FLAG} was given together with --activation-checkpointing {activation_checkpointing}",
            because=f"{activation_checkpointing} is the mode of all layers",
            hint="leave one of them out",
        )


def check_tiled_mlp(mlp: str, offload: str, activation_checkpointing: str, modes: LayerModes | None) -> None:
    """`--mlp` beside what else is pinned.

    Raises:
        RequestError: the two are impossible together.
    """
    if mlp != "tiled":
        return
    of_layers = () if modes is None else [mode for mode, _ in modes.runs]
    flag = FLAG if "selective" in of_layers else "--activation-checkpointing"
    if "selective" in (activation_checkpointing, *of_layers):
        other = f"{flag} {'selective' if modes is None else modes}"
        because = "it keeps the products of all slices until backward"
    elif offload == "nvme":
        other = "--offload nvme"
        because = "an MLP's parameters are gathered all at once, for which there may be too few buffers"
    else:
        return
    raise RequestError(f"--mlp tiled is impossible with {other}", because=because, hint="leave one of them out")
