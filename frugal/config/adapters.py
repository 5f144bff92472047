"""Adapters: the settings of `--lora`. The base model is frozen, and low-rank products beside its layers are trained.

LoRA (https://arxiv.org/abs/2106.09685): `W x + alpha / r * B A x` with `A (r, inputs)` and `B (outputs, r)`, made by
peft.

    frugal train --lora r=16,alpha=32,dropout=0.05,targets=q_proj,v_proj
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any

import msgspec

from frugal.errors import RequestError, refuse

ALL_LINEAR = "all-linear"
"""peft's name of all linear layers except the output head."""

FORM = "--lora r=16,alpha=32,dropout=0.05,targets=q_proj,v_proj"
_KEYS: dict[str, tuple[Any, str]] = {
    "r": (int, "a whole number"),
    "alpha": (float, "a number"),
    "dropout": (float, "a number"),
    "targets": (list[str], f"{ALL_LINEAR} or names of modules"),
    "dora": (bool, "true or false"),
}
"""The type of each key, and its name in messages."""

_OTHER_KEYS = {
    "rank": "r", "lora_r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets",
    "lora_target_modules": "targets", "use_dora": "dora",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters.

    Attributes:
        rank: rows of `A` and columns of `B`.
        alpha: the product is scaled by `alpha / rank`.
        dropout: share of a layer's inputs that are dropped for its adapter, from 0 to less than 1.
        targets: names of the adapted modules (the last parts of their dotted names), or `all-linear`.
        dora: train direction and magnitude separately (https://arxiv.org/abs/2402.09353).
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dora: bool = False

    def __post_init__(self) -> None:
        refuse(
            (self.rank < 1, f"`r` of --lora is {self.rank}", "it must be at least 1", None),
            (
                not (isfinite(self.alpha) and self.alpha > 0),
                f"`alpha` of --lora is {self.alpha:g}",
                "it must be a finite number over 0",
                None,
            ),
            (
                not 0 <= self.dropout < 1,
                f"`dropout` of --lora is {self.dropout:g}",
                "it must be at least 0 and less than 1",
                None,
            ),
            (
                not self.targets or not all(self.targets),
                "`targets` of --lora is empty",
                f"it must be {ALL_LINEAR} or names of modules",
                None,
            ),
            (
                ALL_LINEAR in self.targets and len(self.targets) > 1,
                f"`targets` of --lora is {', '.join(self.targets)}",
                f"{ALL_LINEAR} already names all",
                None,
            ),
        )

    @classmethod
    def of(cls, value: "str | Mapping[str, Any] | Lora") -> "Lora":
        """Return the adapters that a flag, a table of frugal.toml or a caller describes.

        Raises:
            RequestError: a key is unknown, missing, given twice, or has a wrong value.
        """
        if isinstance(value, Lora):
            return value
        given: dict[str, Any] = {}
        for key, each in _parse(value) if isinstance(value, str) else value.items():
            name = _known(key)
            if name in given:
                raise _wrong(name, "there twice", "it has one value")
            given[name] = _converted(name, each)
        if "r" not in given:
            raise RequestError("--lora was given without a rank", hint="write --lora r=16")
        rank = given.pop("r")
        return cls(
            rank=rank,
            alpha=given.pop("alpha", 2.0 * rank),
            targets=tuple(given.pop("targets", (ALL_LINEAR,))),
            **given,
        )

    @classmethod
    def parse(cls, text: str) -> "Lora":
        """Parse `r=16,alpha=32,dropout=0.05,targets=q_proj,v_proj,dora`; alpha is twice the rank by default."""
        return cls.of(text)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        parts = [f"r={self.rank}", f"alpha={self.alpha:g}"]
        parts += [f"dropout={self.dropout:g}"] if self.dropout else []
        parts += ["dora"] if self.dora else []
        return ",".join([*parts, f"targets={','.join(self.targets)}"])


def _parse(text: str) -> list[tuple[str, str]]:
    """Return the keys and values of a text; words without `=` behind `targets=` are more targets."""
    pairs: list[tuple[str, str]] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, is_given, value = word.partition("=")
        if not is_given and key != "dora" and pairs and _OTHER_KEYS.get(pairs[-1][0], pairs[-1][0]) == "targets":
            pairs[-1] = pairs[-1][0], f"{pairs[-1][1]},{key}"
            continue
        if not is_given and _known(key) != "dora":
            raise RequestError(f"`{key}` of --lora has no value", hint=f"write {FORM}")
        pairs.append((key.strip(), value.strip() if is_given else "true"))
    return pairs


def _known(key: str) -> str:
    """Return our name of a key.

    Raises:
        RequestError: there is no such key.
    """
    name = _OTHER_KEYS.get(key, key)
    if name not in _KEYS:
        near = next(iter(get_close_matches(key, [*_KEYS, *_OTHER_KEYS], n=1)), "")
        raise RequestError(
            f"--lora knows no `{key}`",
            because=f"it has {', '.join(_KEYS)}",
            hint=f"did you mean `{_OTHER_KEYS.get(near, near)}`?" if near else f"write {FORM}",
        )
    return name


def _converted(key: str, value: Any) -> Any:
    """Return a value in the type of its key; numbers may be text."""
    kind, words = _KEYS[key]
    is_text = isinstance(value, str)
    try:
        if key == "targets" and is_text:
            return value.split(",")
        return msgspec.convert(value, kind, strict=not is_text)
    except msgspec.ValidationError:
        raise _wrong(key, value if is_text else repr(value), f"it must be {words}") from None


def _wrong(key: str, value: Any, because: str) -> RequestError:
    return RequestError(f"`{key}` of --lora is {value}", because=because)
