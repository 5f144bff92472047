"""What a configuration says, in one set of words for all tools, and where it says so.

A reader fills `Settings` from one tool's file. What it does not know it lists (`unknown`); what it knows and frugal
cannot do is a deviation, or a reason not to check at all (`refusals`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from frugal.check.documents.document import Document, Place
from frugal.config.adapters import Lora
from frugal.config.optimizers import OptimizerImplementation, OptimizerName
from frugal.config.request import Precision, Task
from frugal.errors import RequestError

Level = Literal["error", "warning", "note"]

AUTO = "auto"
"""What DeepSpeed's JSON says where somebody else is to fill a value in."""


@dataclass(frozen=True)
class Finding:
    """A trap. `rule` names its kind; `error`: it does not start, or trains something else than it seems to."""

    rule: str
    level: Level
    text: str
    place: Place | None = None
    hint: str = ""


@dataclass(frozen=True)
class Deviation:
    """What is evaluated otherwise than it is written, and what that changes."""

    text: str
    place: Place | None = None


@dataclass(kw_only=True)
class Settings:
    """What is to be trained and how. None: not said.

    Attributes:
        tool: whose training script it is, in words.
        micro_batch: samples of one GPU in one forward.
        accumulation_steps: forwards for one optimizer step.
        global_batch: samples of one optimizer step, where it is said itself.
        gpus: processes of one node.
        seq_len: tokens of the longest sample.
        optimizer: the nearest that frugal has; deviations say what is not the same.
        activation_checkpointing: whether layers are recomputed.
        use_reentrant: of torch's activation checkpointing.
        tiled_loss: the logits are not held whole (Liger, chunked cross entropy).
        tiled_mlp: layers' MLPs run on a slice of the positions at a time.
        sequence_parallel: GPUs that share each sample.
        deepspeed: its JSON as it is written, with `auto`; None: DeepSpeed is not used.
        fills_auto: whether the tool replaces `auto` in DeepSpeed's JSON.
        places: where each of these was read, by name; those of DeepSpeed's JSON as `json.` and their dotted names.
        raw: further values that a trap asks for, by the tool's own names.
    """

    tool: str = ""
    model: str | None = None
    task: Task | None = None
    seq_len: int | None = None
    micro_batch: int | None = None
    accumulation_steps: int | None = None
    global_batch: int | None = None
    gpus: int | None = None
    nodes: int | None = None
    precision: Precision | None = None
    optimizer: OptimizerName | None = None
    optimizer_implementation: OptimizerImplementation | None = None
    momentum: float | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    gradient_clipping: float | None = None
    lora: Lora | None = None
    quantize: str | None = None
    activation_checkpointing: bool = False
    use_reentrant: bool | None = None
    use_cache: bool | None = None
    packing: bool = False
    packs_apart: bool | None = None
    tiled_loss: bool = False
    tiled_mlp: bool = False
    sequence_parallel: int = 1
    expandable_segments: bool | None = None
    deepspeed: Mapping[str, Any] | None = None
    fills_auto: bool = False
    raw: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    deviations: list[Deviation] = field(default_factory=list)
    refusals: list[Deviation] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unknown: list[Place] = field(default_factory=list)

    def place(self, *names: str) -> Place | None:
        """Where the first of these that was read stands."""
        return next((self.places[name] for name in names if name in self.places), None)

    def deviate(self, text: str, place: Place | None = None) -> None:
        """Note that what is evaluated is not quite what is written."""
        self.deviations.append(Deviation(text, place))

    def refuse(self, text: str, place: Place | None = None) -> None:
        """Note why memory cannot be checked."""
        self.refusals.append(Deviation(text, place))


class Fields:
    """The values of one document, of which the ones that were asked for are known.

    Raises, everywhere:
        RequestError: a value is of the wrong kind; the message has its place.
    """

    def __init__(self, document: Document, settings: Settings, prefix: tuple[str, ...] = ()) -> None:
        self.document = document
        self.settings = settings
        self._prefix = prefix
        self._content: Mapping[str, Any] = document.content
        for key in prefix:
            inside = self._content.get(key) or {}
            if not isinstance(inside, dict):
                raise RequestError(
                    f"`{key}` in {document.place(*prefix)} is {inside!r}", because="it must be a mapping"
                )
            self._content = inside
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._content.get(key) is not None

    def place(self, key: str) -> Place:
        """Where a key stands."""
        return self.document.place(*self._prefix, key)

    def value(self, *keys: str, of: str | None = None) -> Any:
        """The first of `keys` that is there; None if none is. `of`: the setting whose place this is."""
        self._asked |= set(keys)
        for key in keys:
            value = self._content.get(key)
            if value is not None:
                if of is not None:
                    self.settings.places[of] = self.place(key)
                return value
        return None

    def whole(self, *keys: str, of: str | None = None) -> int | None:
        """A whole number, also as text."""
        return self._number("a whole number", _whole, keys, of)

    def number(self, *keys: str, of: str | None = None) -> float | None:
        """A number, also as text: YAML 1.1 reads `2e-5` as text."""
        return self._number("a number", float, keys, of)

    def text(self, *keys: str, of: str | None = None) -> str | None:
        """A word."""
        value = self.value(*keys, of=of)
        return None if value is None else str(value)

    def flag(self, *keys: str, of: str | None = None) -> bool | None:
        """True or false, also as text, which is what a command line has."""
        value = self.value(*keys, of=of)
        if value is None or isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "yes", "1", "false", "no", "0"):
            return str(value).lower() in ("true", "yes", "1")
        raise self._wrong(keys, value, "true or false")

    def names(self, *keys: str, of: str | None = None) -> list[str]:
        """A list of names, which may be one text with commas or spaces between them."""
        value = self.value(*keys, of=of)
        if isinstance(value, str):
            return value.replace(",", " ").split()
        if value is not None and not isinstance(value, list):
            raise self._wrong(keys, value, "a list of names")
        return [str(name) for name in value or ()]

    def _number(self, kind: str, read: Callable[[Any], Any], keys: tuple[str, ...], of: str | None) -> Any:
        value = self.value(*keys, of=of)
        if value is None:
            return None
        try:
            if isinstance(value, bool | list | dict):
                raise ValueError
            return read(value)
        except (ValueError, OverflowError):
            raise self._wrong(keys, value, kind) from None

    def _wrong(self, keys: tuple[str, ...], value: Any, must_be: str) -> RequestError:
        key = next(key for key in keys if self._content.get(key) is not None)
        return RequestError(f"`{key}` in {self.place(key)} is {value!r}", because=f"it must be {must_be}")

    def known(self, *keys: str) -> None:
        """These change no memory, or were looked at elsewhere."""
        self._asked |= set(keys)

    def list_unknown(self, no_effect: Iterable[str] = ()) -> None:
        """Into `settings.unknown` what nobody has asked for."""
        known = self._asked | set(no_effect)
        self.settings.unknown += [
            self.place(key) for key in self._content if key not in known and not key.startswith("(")
        ]


def _whole(value: Any) -> int:
    number = float(value)
    if number != int(number):
        raise ValueError
    return int(number)
