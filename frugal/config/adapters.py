"""Adapters: the settings of `--lora`. The base model is frozen, and low-rank products beside its layers are trained.

LoRA (https://arxiv.org/abs/2106.09685): `W x + alpha / r * B A x` with `A (r, inputs)` and `B (outputs, r)`, made by
peft.

    frugal train --lora r=16,alpha=32,dropout=0.05,targets=q_proj,v_proj
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from frugal.config.setting import KeyTable
from frugal.errors import refuse

ALL_LINEAR = "all-linear"
"""peft's name of all linear layers except the output head."""

LORA = KeyTable(
    flag="--lora",
    types={"r": int, "alpha": float, "dropout": float, "targets": list[str], "dora": bool},
    example="r=16,alpha=32,dropout=0.05,targets=q_proj,v_proj",
    others={
        "rank": "r", "lora_r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets",
        "lora_target_modules": "targets", "use_dora": "dora",
    },
)  # fmt: skip


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
        given = LORA.read(value)
        refuse(("r" not in given, "--lora was given without a rank", "", "write --lora r=16"))
        rank = given.pop("r")
        return cls(
            rank=rank,
            alpha=given.pop("alpha", 2.0 * rank),
            targets=tuple(given.pop("targets", (ALL_LINEAR,))),
            **given,
        )

    def __str__(self) -> str:
        """The text that `of` reads."""
        parts = [f"r={self.rank}", f"alpha={self.alpha:g}"]
        parts += [f"dropout={self.dropout:g}"] if self.dropout else []
        parts += ["dora"] if self.dora else []
        return ",".join([*parts, f"targets={','.join(self.targets)}"])
