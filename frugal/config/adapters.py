"""Adapters: what `--lora` says. The base model is frozen, and narrow products beside its layers are trained.

LoRA (https://arxiv.org/abs/2106.09685): `W x + alpha / r * B A x` with `A (r, inputs)` and `B (outputs, r)`, made by
peft.

    frugal train --lora r=16,alpha=32,dropout=0.05,targets=q_proj,v_proj
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any

from frugal.errors import RequestError

ALL_LINEAR = "all-linear"
"""All linear layers but the output head: what peft takes it for."""

FORM = "--lora r=16,alpha=32,dropout=0.05,targets=q_proj,v_proj"
_KEYS = ("r", "alpha", "dropout", "targets", "dora")
_OTHER_KEYS = {
    "rank": "r", "lora_r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets",
    "lora_target_modules": "targets", "use_dora": "dora",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters.

    Attributes:
        rank: rows of `A` and columns of `B`.
        alpha: the product counts `alpha / rank`.
        dropout: share of a layer's inputs that its adapter does not see, from 0 to less than 1.
        targets: names of the modules that get one (the last parts of their dotted names), or `all-linear`.
        dora: direction and magnitude apart (https://arxiv.org/abs/2402.09353).
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dora: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise _wrong("r", self.rank, "it must be a whole number, at least 1")
        if not (isfinite(self.alpha) and self.alpha > 0):
            raise _wrong("alpha", f"{self.alpha:g}", "it must be a finite number over 0")
        if not 0 <= self.dropout < 1:
            raise _wrong("dropout", f"{self.dropout:g}", "it must be at least 0 and less than 1")
        if not self.targets or not all(self.targets):
            raise _wrong("targets", "empty", f"it must be {ALL_LINEAR} or names of modules")
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise _wrong("targets", ", ".join(self.targets), f"{ALL_LINEAR} leaves nothing to add")

    @classmethod
    def of(cls, value: "str | Mapping[str, Any] | Lora") -> "Lora":
        """What a flag, a table of frugal.toml or a caller says: text as for `parse`, or its keys and values.

        Raises:
            RequestError: it says no adapter.
        """
        if isinstance(value, Lora):
            return value
        return cls.parse(value) if isinstance(value, str) else cls._of_values(value)

    @classmethod
    def parse(cls, text: str) -> "Lora":
        """`r=16,alpha=32,dropout=0.05,targets=q_proj,v_proj,dora`; alpha is twice the rank where it is left out.

        Raises:
            RequestError: it says no adapter.
        """
        values: dict[str, Any] = {}
        last = ""
        for word in filter(None, (part.strip() for part in text.split(","))):
            key, is_given, value = word.partition("=")
            key = key.strip()
            if not is_given and key != "dora" and last == "targets":
                values["targets"].append(key)
                continue
            last = _known(key, is_given=bool(is_given))
            if last in values:
                raise _wrong(last, "there twice", "it has one value")
            values[last] = value.strip()
            if last == "dora":
                values["dora"] = _yes_or_no(value.strip() if is_given else "true")
            elif last == "targets":
                values["targets"] = [value.strip()]
        return cls._of_values(values)

    @classmethod
    def _of_values(cls, values: Mapping[str, Any]) -> "Lora":
        """Of keys and values, of which numbers may be text."""
        given = {_known(key, is_given=True): value for key, value in values.items()}
        if "r" not in given:
            raise RequestError("--lora was given without a rank", hint="write --lora r=16")
        rank = _number("r", given["r"], int)
        targets = given.get("targets", ALL_LINEAR)
        if not isinstance(targets, str | list | tuple) or not all(isinstance(name, str) for name in targets):
            raise _wrong("targets", repr(targets), f"it must be {ALL_LINEAR} or names of modules")
        dora = given.get("dora", False)
        if not isinstance(dora, bool):
            raise _wrong("dora", repr(dora), "it must be true or false")
        return cls(
            rank=rank,
            alpha=_number("alpha", given.get("alpha", 2 * rank), float),
            dropout=_number("dropout", given.get("dropout", 0.0), float),
            targets=tuple(targets.split(",") if isinstance(targets, str) else targets),
            dora=dora,
        )

    def __str__(self) -> str:
        """The text that `parse` makes the same of."""
        parts = [f"r={self.rank}", f"alpha={self.alpha:g}"]
        parts += [f"dropout={self.dropout:g}"] if self.dropout else []
        parts += ["dora"] if self.dora else []
        return ",".join([*parts, f"targets={','.join(self.targets)}"])


def _wrong(key: str, value: Any, because: str) -> RequestError:
    return RequestError(f"`{key}` of --lora is {value}", because=because)


def _known(key: str, *, is_given: bool) -> str:
    """Our name of a key.

    Raises:
        RequestError: there is no such key, or it has no value.
    """
    name = _OTHER_KEYS.get(key, key)
    if name not in _KEYS:
        near = _near(key, [*_KEYS, *_OTHER_KEYS])
        raise RequestError(
            f"--lora knows no `{key}`",
            because=f"it has {', '.join(_KEYS)}",
            hint=f"did you mean `{_OTHER_KEYS.get(near, near)}`?" if near else f"write {FORM}",
        )
    if not is_given and name != "dora":
        raise RequestError(f"`{key}` of --lora has no value", hint=f"write {FORM}")
    return name


def _near(key: str, known: Iterable[str]) -> str:
    return next(iter(get_close_matches(key, list(known), n=1)), "")


def _number(key: str, value: Any, kind: type) -> Any:
    whole = kind is int
    if isinstance(value, bool) or not isinstance(value, str | int | float) or (whole and isinstance(value, float)):
        raise _wrong(key, repr(value), f"it must be a {'whole ' if whole else ''}number")
    try:
        return kind(value)
    except ValueError:
        raise _wrong(key, value, f"it must be a {'whole ' if whole else ''}number") from None


def _yes_or_no(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise _wrong("dora", word, "it must be true or false")
    return word.lower() == "true"
