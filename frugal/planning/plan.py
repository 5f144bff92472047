"""The decision: the door between planning and training.

`plan.json` is this module's `Plan`, encoded, with what repeats told once (`frugal.planning.plan`). Everything needed
to run it is in it; DeepSpeed's JSON is a print-out.

What `plan.json` tells in few words: equal nodes once, and cells one by one only where they are few.

    cluster.nodes   equal nodes that follow each other are one entry, with their `count`
    batch.cells     samples of each rank in each micro-step, up to `MOST_CELLS` of them; beyond that null, because
                    `batch.micro_steps` says the same for a thousand ranks and micro-steps in a few numbers

Both work on what msgspec makes of a plan: dictionaries, lists and numbers.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from frugal.config.cluster import MOST_RANKS, Cluster
from frugal.config.request import Request
from frugal.errors import PlanMismatchError, RequestError
from frugal.planning.batch import Cells, MicroSteps, cells
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.strategy import Strategy

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """The model the plan is for: parameters (elements) and FLOPs of forward and backward of one full-length sample."""

    task: str
    parameters: int
    trainable_parameters: int
    largest_parameter: int
    flops_per_sample: float


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The global batch and its cells. For a token target these are the cells of full-length samples.

    `micro_batch` has the most each rank takes at once. `micro_steps` are the cells, told in a few numbers however many
    ranks and micro-steps there are: see `frugal.planning.batch`.

    Samples of different lengths: in a micro-batch, a sample counts as its own tokens, and at least as `shortest`, all
    padded to the longest and no more than `micro_batch` samples of full length; None: each counts as one of those.
    `overhead_tokens`: what a micro-step takes besides its tokens, in tokens of the same time; None: the fewest
    micro-steps are wanted. See `frugal.planning.length_bucketing`.
    """

    global_batch: int
    global_tokens: int | None
    world_size: int
    micro_batch: tuple[int, ...]
    accumulation_steps: int
    micro_steps: tuple[MicroSteps, ...]
    shortest: int | None = None
    overhead_tokens: int | None = None

    def __post_init__(self) -> None:
        made = self.cut
        assert made.global_batch == self.global_batch, "the cells do not add up to the global batch"
        assert made.world_size == self.world_size
        assert made.accumulation_steps == self.accumulation_steps, "the micro-steps are not as many as it says"

    @classmethod
    def of(
        cls,
        global_batch: int,
        micro_batch: tuple[int, ...],
        global_tokens: int | None = None,
        *,
        accumulation_steps: int | None = None,
    ) -> "Batch":
        """`global_batch` samples under one micro-batch cap a rank, in the fewest steps or as many as given."""
        made = cells(global_batch, micro_batch, num_steps=accumulation_steps)
        return cls(
            global_batch=global_batch,
            global_tokens=global_tokens,
            world_size=made.world_size,
            micro_batch=micro_batch,
            accumulation_steps=made.accumulation_steps,
            micro_steps=made.micro_steps,
        )

    @cached_property
    def cut(self) -> Cells:
        """The cells."""
        return Cells(self.micro_batch, self.micro_steps)

    @property
    def cells(self) -> tuple[tuple[int, ...], ...]:
        """The cells one by one: samples of each rank in each micro-step."""
        return self.cut.sizes

    @property
    def capacity(self) -> int:
        """Samples the cells could hold; DeepSpeed's JSON can only say this number."""
        return self.accumulation_steps * self.largest_cell * self.world_size

    @property
    def largest_cell(self) -> int:
        """Samples of the largest cell."""
        return max(self.cut.largest)

    @property
    def is_uniform(self) -> bool:
        """Whether all cells are equal: `micro-batch x accumulation x world` is the global batch."""
        return self.cut.is_uniform

    def tightened(self) -> "Batch":
        """As many samples in each micro-step under caps that they fill: each group's largest cell, and at least 1.

        Groups whose largest cells are the same become one.
        """
        cut = self.cut
        tight = [max(1, largest) for largest in cut.largest]
        if tight == list(cut.groups):
            return self
        new_caps = dict(zip(cut.groups, tight, strict=True))
        return replace(
            self,
            micro_batch=tuple(map(new_caps.__getitem__, self.micro_batch)),
            micro_steps=tuple(
                replace(
                    steps,
                    samples=tuple(
                        sum(size for size, other in zip(steps.samples, tight, strict=True) if other == cap)
                        for cap in sorted(set(tight))
                    ),
                )
                for steps in self.micro_steps
            ),
        )

    def cells_for(self, num_samples: int) -> Cells:
        """The cells of a global batch that happens to have another size: the last of an epoch, or one of tokens."""
        return self.cut if num_samples == self.global_batch else cells(num_samples, self.micro_batch)


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """What the data comes to where the plan knows how long its samples are, as `Lengths` of the request say.

    Attributes:
        num_samples: in the data.
        num_tokens: in them, without padding.
        median: tokens that half of the samples have at most.
        percentile_99: tokens that 99 of 100 samples have at most.
        longest: tokens of the longest sample.
        source: where the lengths are from.
        step_samples: of a typical global batch.
        step_tokens: of a typical global batch, without padding.
        micro_steps: that a typical global batch takes; `Batch.accumulation_steps` are those of full-length samples.
        padding: padded positions for each token.
        fixed_padding: the same for micro-batches of a fixed number of samples in random order.
        full_share: the work of the micro-steps' slowest ranks, as a part of what full-length samples would take.
    """

    num_samples: int
    num_tokens: int
    median: int
    percentile_99: int
    longest: int
    source: str
    step_samples: int
    step_tokens: int
    micro_steps: int
    padding: float
    fixed_padding: float
    full_share: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of one optimizer step, in parts that add up to the total."""

    compute_seconds: float
    recompute_seconds: float
    communication_seconds: float
    offload_seconds: float
    optimizer_seconds: float
    total_seconds: float

    def __post_init__(self) -> None:
        parts = (
            self.compute_seconds, self.recompute_seconds, self.communication_seconds,
            self.offload_seconds, self.optimizer_seconds,
        )  # fmt: skip
        assert abs(sum(parts) - self.total_seconds) <= 1e-6 * self.total_seconds


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A strategy that was not taken.

    `headroom_bytes` is negative where it does not fit: the shortfall. None where it was not looked at, because it could
    not have been faster. `is_bound`: its bytes and seconds are the least it would take, its headroom is the most there
    could be. `accumulation_steps` and `time` are None where no batch fits, `peak_bytes` where none is known.
    """

    strategy: Strategy
    micro_batch: int
    reason: str
    headroom_bytes: int | None
    step_seconds: float | None
    accumulation_steps: int | None = None
    peak_bytes: int | None = None
    time: StepTime | None = None
    is_bound: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A decision with its prediction and its reasons.

    `memory` is the fullest rank's. `defaults` names the request's fields that the user did not set.
    `why` is for people, in order of importance. `grouping`: what the data comes to, None where nothing is known of it;
    the time is then that of a step of full-length samples. `digest` is the SHA-256 of all the rest.
    """

    schema: int = SCHEMA
    digest: str = ""
    frugal_version: str
    versions: dict[str, str]
    request: Request
    defaults: tuple[str, ...]
    model: ModelSummary
    cluster: Cluster
    strategy: Strategy
    batch: Batch
    memory: MemoryBreakdown
    time: StepTime
    why: tuple[str, ...]
    warnings: tuple[str, ...]
    rejected: tuple[Rejected, ...]
    grouping: Grouping | None = None

    def __post_init__(self) -> None:
        assert self.batch.world_size == self.cluster.world_size
        assert self.memory.fits, "a plan that does not fit is no plan"

    @property
    def counted(self) -> str:
        """What a global batch of tokens counts, in words."""
        return "target tokens" if self.model.task == "seq2seq" else "tokens"

    def sealed(self) -> "Plan":
        """The same plan with its digest, in the types it has when it is read: a whole number of seconds is a float."""
        as_read = msgspec.convert(msgspec.to_builtins(self), type(self))
        return replace(as_read, digest=as_read.compute_digest())

    def compute_digest(self) -> str:
        """SHA-256 of the plan without its digest, hexadecimal."""
        return hashlib.sha256(msgspec.json.encode(replace(self, digest=""))).hexdigest()

    def to_json(self) -> bytes:
        """The text of `plan.json`."""
        return msgspec.json.format(self._packed(), indent=2) + b"\n"

    def _packed(self) -> bytes:
        few = self.batch.world_size * self.batch.accumulation_steps <= MOST_CELLS
        return msgspec.json.encode(compacted(msgspec.to_builtins(self), self.batch.cells if few else None))

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """The plan in a file.

        Raises:
            RequestError: no such file, no JSON, or not a plan.
            PlanMismatchError: another schema, or changed by hand.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RequestError(
                f"cannot read the plan {path}", because=str(error.strerror), hint="make one with `frugal plan -o DIR`"
            ) from None
        return cls.from_json(data, source=str(path))

    @classmethod
    def from_json(cls, data: bytes, *, source: str = "plan.json") -> "Plan":
        """The plan in the text of a `plan.json`; `source` names it in messages. Raises as `read`."""
        hint = "make a new one with `frugal plan -o DIR`"
        try:
            raw = msgspec.json.decode(data)
            if isinstance(raw, dict) and raw.get("schema", SCHEMA) != SCHEMA:
                raise PlanMismatchError(
                    f"{source} has schema {raw['schema']}, this frugal reads schema {SCHEMA}", hint=hint
                )
            plan = msgspec.convert(expanded(raw), cls, strict=True)
        except RequestError as error:
            raise RequestError(f"{source} is not a plan", because=(error.what, *error.because), hint=hint) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"{source} is not a plan", because=str(error), hint=hint) from None
        except AssertionError as error:
            raise RequestError(
                f"{source} contradicts itself", because=str(error) or "its numbers do not agree", hint=hint
            ) from None
        has_more = msgspec.json.decode(plan._packed()) != raw  # keys that we do not know
        if has_more or plan.compute_digest() != plan.digest:
            raise PlanMismatchError(
                f"{source} was changed after it was made", because="its digest does not match its content", hint=hint
            )
        return plan


MOST_CELLS = 8192


def compacted(plan: dict[str, Any], cells: tuple[tuple[int, ...], ...] | None) -> dict[str, Any]:
    """`plan` as it is written; `cells` are the batch's, None where they are too many."""
    nodes: list[dict[str, Any]] = []
    for node in plan["cluster"]["nodes"]:
        if nodes and node == {name: value for name, value in nodes[-1].items() if name != "count"}:
            nodes[-1]["count"] += 1
        else:
            nodes.append({"count": 1, **node})
    return plan | {"cluster": plan["cluster"] | {"nodes": nodes}, "batch": plan["batch"] | {"cells": cells}}


def expanded(raw: Any) -> Any:
    """What was `packed`. Anything else is left as it is, for the types to complain about."""
    if not isinstance(raw, dict) or not isinstance(raw.get("cluster"), dict) or not isinstance(raw.get("batch"), dict):
        return raw
    cluster, batch = raw["cluster"], {name: value for name, value in raw["batch"].items() if name != "cells"}
    if not isinstance(cluster.get("nodes"), list):
        return raw
    nodes = [again for node in cluster["nodes"] for again in _each(node)]
    return raw | {"cluster": cluster | {"nodes": nodes}, "batch": batch}


def _each(node: Any) -> list[Any]:
    """A node as often as it says."""
    count = node.get("count") if isinstance(node, dict) else None
    if type(count) is not int or not 1 <= count <= MOST_RANKS:
        return [node]
    return [{name: value for name, value in node.items() if name != "count"}] * count
