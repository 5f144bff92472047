"""A measurement as one small row that may be given away: plan, card, versions and bytes, nothing private.

Written is what `SharedRow` names, and no text that a user chose: of a model's configuration its kind and its numbers,
of a factory nothing; no name of a model, a host or a user, no path, no command, no digest.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from frugal.config.request import Task
from frugal.dryrun.compare import Measurement
from frugal.errors import RequestError
from frugal.planning.strategy import Strategy


class Bytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of the fullest rank, each figure under the name that `frugal dryrun --json` has for it."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    phases: dict[str, int]
    context_bytes: int | None = None


class SharedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured run and what was predicted for it.

    Attributes:
        schema: of this row.
        card: as the driver names it; of CPU ranks the processor.
        num_ranks: the world size.
        model: the numbers of a configuration of transformers and its `model_type`; empty: a factory.
        rank: of LoRA; 0: none.
        survived_cap: whether a run with the predicted memory went through; None: not tried.
    """

    schema: int = 1
    kind: str
    card: str
    driver: str
    num_ranks: int
    versions: dict[str, str]
    date: str
    model: dict[str, Any]
    task: Task | None
    seq_len: int
    precision: str
    optimizer: str
    optimizer_states: str | None
    quantize: str | None
    rank: int
    pack: bool
    strategy: Strategy
    micro_batch: int
    accumulation_steps: int
    predicted: Bytes
    measured: Bytes
    survived_cap: bool | None

    @classmethod
    def of(cls, measurement: Measurement) -> "SharedRow":
        """Return the row of a measurement."""
        request, batch = measurement.request, measurement.batch
        figures, measured = measurement.predicted, measurement.measured
        strategy = measurement.strategy
        return cls(
            kind=measurement.kind, card=measurement.device, driver=measurement.driver, num_ranks=batch.world_size,
            versions=measurement.versions, date=measurement.date, model=_numbers(measurement.definition.config or {}),
            task=measurement.definition.task, seq_len=request.seq_len, precision=request.precision,
            optimizer=request.optimizer.name, optimizer_states=request.optimizer.states, quantize=request.quantize,
            rank=0 if request.lora is None else request.lora.rank, pack=bool(request.pack),
            strategy=replace(strategy, nvme_path=strategy.nvme_path and "nvme"),
            micro_batch=batch.largest_micro_batch, accumulation_steps=batch.accumulation_steps,
            predicted=Bytes(
                peak_allocated_bytes=figures.peak_allocated_bytes, peak_reserved_bytes=figures.peak_reserved_bytes,
                phases=figures.phases, context_bytes=measurement.cluster.devices[0].context_bytes,
            ),
            measured=Bytes(
                peak_allocated_bytes=measured.peak_allocated_bytes, peak_reserved_bytes=measured.peak_reserved_bytes,
                phases=measured.phases, context_bytes=measured.context_bytes,
            ),
            survived_cap=None if measurement.capped is None else measurement.capped.survived,
        )  # fmt: skip

    def encode(self) -> bytes:
        """Return the row's text."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def read(cls, path: Path) -> "SharedRow":
        """Read a row.

        Raises:
            RequestError: no such file, or no row.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise RequestError(f"cannot read the row {path}", because=str(error.strerror)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, AssertionError) as error:
            raise RequestError(f"{path} is no row of `frugal measure --share`", because=str(error)) from None


def _numbers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a configuration and of those within, and each one's `model_type`."""
    within = {
        name: _numbers(each) for name, each in config.items() if isinstance(each, dict) and name.endswith("_config")
    }
    kind = str(config.get("model_type", ""))
    known = {"model_type": kind} if re.fullmatch(r"[a-z0-9_.-]{1,40}", kind) else {}
    return known | {name: each for name, each in config.items() if _is_numbers(each)} | within


def _is_numbers(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, list) and all(map(_is_numbers, value)))
