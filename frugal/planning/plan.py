"""The decision: the interface between planning and training.

`plan.json` is this module's `Plan`, encoded. Everything needed to run it is in it; DeepSpeed's JSON is a print-out. It
differs from the dataclasses in two places:

    cluster.nodes             consecutive equal nodes are one entry, with their `count`
    batch.micro_batch_sizes   written for other programs, never read: samples of each rank in each micro-step, or null
                              where these are more than `MAX_LISTED_SIZES`
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from html import escape
from math import ceil, inf
from pathlib import Path
from typing import Any, get_args

import msgspec

from frugal import files
from frugal.config.hardware.cluster import CARDS, MOST_RANKS, Cluster
from frugal.config.request import Request, Task
from frugal.errors import PlanMismatchError, RequestError, failure, refuse
from frugal.planning.batch import BatchPlan
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.model_facts import ModelSummary
from frugal.planning.strategy import Strategy
from frugal.units import format_bytes, format_count, format_rate, format_seconds, plural

SCHEMA = 6

NAME_WIDTH = 7
"""Columns of the name of a row in a printed plan, with the space behind it; a longer name takes one more."""

KERNELS = "kernels are"
"""The beginning of the reason that names fused kernels."""

UNPROVEN = "a draft: its memory is arithmetic, and no dry run has proven it"
"""The warning of a draft plan."""


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """The samples of the data and of a typical global batch, where the request knows their lengths.

    Attributes:
        num_samples: in the data.
        num_tokens: in them, without padding.
        median: tokens that half of the samples have at most.
        percentile_99: tokens that 99 of 100 samples have at most.
        longest: tokens of the longest sample.
        source: where the lengths are from.
        step_samples: of a typical global batch.
        step_tokens: of a typical global batch, without padding.
        micro_steps: that a typical global batch takes; `BatchPlan.accumulation_steps` are those of full-length samples.
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
        assert abs(sum(self.parts.values()) - self.total_seconds) <= 1e-6 * self.total_seconds

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part by name."""
        return {
            "compute": self.compute_seconds,
            "recompute": self.recompute_seconds,
            "communication": self.communication_seconds,
            "offload": self.offload_seconds,
            "optimizer": self.optimizer_seconds,
        }


def speed_in_words(time: StepTime, samples: int) -> str:
    """Return `3.0 s estimated, 169 samples/s: compute 91 %, communication 9 %` of a step of so many samples."""
    total = time.total_seconds
    parts = ((name, part) for name, part in time.parts.items() if part >= total / 100)
    shares = ", ".join(f"{name} {100 * part / total:.0f} %" for name, part in parts)
    rate = f"{samples / total:,.0f}" if samples >= 100 * total else f"{samples / total:.3g}"
    return f"{format_seconds(total)} estimated, {rate} samples/s: {shares}"


def binds_in_short(sentence: str) -> str:
    """Return the last sentence of `Plan.why` for a row that is called `binds`."""
    return sentence.partition(";")[0].replace(" binds:", ":")


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
class RunCost:
    """The predicted time of a run's steps, without its start, evaluations and checkpoints; see `Plan.cost`.

    Attributes:
        length_steps: the length in optimizer steps, if it was given so.
        length_tokens: the length in tokens, if it was given so.
        gpu_hour_price: in any currency; None where there is none.
        step_seconds: time of an optimizer step.
        step_tokens: tokens of an optimizer step, without padding.
        num_devices: all of them.
        device: the word for a device.
    """

    length_steps: int | None = None
    length_tokens: int | None = None
    gpu_hour_price: float | None = None
    step_seconds: float
    step_tokens: int
    num_devices: int
    device: str = "GPU"

    @property
    def steps(self) -> int:
        """The optimizer steps."""
        return self.length_steps or ceil((self.length_tokens or 0) / self.step_tokens)

    @property
    def tokens(self) -> int:
        """The tokens of all steps, without padding."""
        return self.steps * self.step_tokens

    @property
    def seconds(self) -> float:
        """The wall time."""
        return self.steps * self.step_seconds

    @property
    def device_hours(self) -> float:
        """The hours of all devices together."""
        return self.seconds / 3600 * self.num_devices

    @property
    def cost(self) -> float | None:
        """The cost in the currency of the price; None where there is none."""
        return None if self.gpu_hour_price is None else self.device_hours * self.gpu_hour_price

    def __str__(self) -> str:
        """Return `1000 steps of 524,288 tokens, 524.3M in all: 50 min, 3.33 GPU hours, cost 6.66 (predicted)`."""
        time, *cost = self.in_brief
        shown = f"{self.device_hours:,.0f}" if self.device_hours >= 100 else f"{self.device_hours:.3g}"
        parts = ", ".join([time, f"{shown} {self.device} hours", *cost])
        a_step = f"{plural(self.steps, 'step')} of {self.step_tokens:,} tokens"
        return f"{a_step}, {format_count(self.tokens)} in all: {parts} (predicted)"

    @property
    def in_brief(self) -> list[str]:
        """The time, and the cost where a price is known."""
        cost = [] if self.cost is None else [f"cost {self.cost:,.2f}"]
        return [format_seconds(self.seconds), *cost]


def check_run_length(
    steps: int | None = None,
    epochs: float | None = None,
    train_tokens: int | None = None,
    gpu_hour_price: float | None = None,
    *,
    knows_samples: bool,
) -> None:
    """Check the length and the price that `Plan.cost` takes; `knows_samples`: whether the plan is for known data.

    Raises: as `Plan.cost`.
    """
    numbers = (("--steps", steps), ("--epochs", epochs), ("--train-tokens", train_tokens))
    given = {flag: number for flag, number in numbers if number is not None}
    refuse(
        (not given, "the length of a run is not known", "", "add --steps N, --epochs N or --train-tokens N"),
        (len(given) > 1, f"{' and '.join(given)} were both given", "", "leave one of them out"),
        (
            not 0 <= (gpu_hour_price or 0) < inf,
            f"--gpu-hour-price is {gpu_hour_price}",
            "a price is 0 or more",
            None,
        ),
        *((number <= 0, f"{flag} is {number}", "it must be more than 0", None) for flag, number in given.items()),
        (
            epochs is not None and not knows_samples,
            "--epochs was given without --data",
            "how many samples an epoch has is not known",
            "add --data PATH, or use --steps N or --train-tokens N",
        ),
    )


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
    batch: BatchPlan
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
    def all_versions(self) -> dict[str, str]:
        """The versions that it was made with, by name, frugal's among them."""
        return {"frugal": self.frugal_version, **self.versions}

    @property
    def counted(self) -> str:
        """The words for what a global batch of tokens counts."""
        return "target tokens" if self.model.task == "seq2seq" else "tokens"

    @property
    def arithmetic(self) -> str:
        """The global batch in one line: `512 samples = 4 GPUs x micro-batch 8 x 16 accumulation steps`."""
        return self.batch.arithmetic(self.cluster.rank_noun, self.counted, self.request.seq_len)

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step without padding; of the data's, where their lengths are known."""
        return self.batch.global_batch * self.request.seq_len if self.grouping is None else self.grouping.step_tokens

    def cost(
        self,
        *,
        steps: int | None = None,
        epochs: float | None = None,
        train_tokens: int | None = None,
        gpu_hour_price: float | None = None,
    ) -> RunCost:
        """Return the predicted time of a run and its cost: `plan.cost(steps=1000, gpu_hour_price=2.5)`.

        Exactly one of `steps`, `epochs` and `train_tokens` says its length.

        Raises:
            RequestError: none or several do, or the plan does not know how many samples an epoch has.
        """
        check_run_length(steps, epochs, train_tokens, gpu_hour_price, knows_samples=self.grouping is not None)
        if epochs is not None and self.grouping is not None:
            steps = ceil(epochs * self.grouping.num_samples / self.grouping.step_samples)
        return RunCost(
            length_steps=steps, length_tokens=train_tokens, gpu_hour_price=gpu_hour_price,
            step_seconds=self.time.total_seconds, step_tokens=self.step_tokens, num_devices=self.cluster.world_size,
            device=self.cluster.rank_noun,
        )  # fmt: skip

    @property
    def is_draft(self) -> bool:
        """True if the plan has not been dry-run: its memory is arithmetic, and a dry run may still refuse it."""
        return UNPROVEN in self.warnings

    def __str__(self) -> str:
        """Return warnings and the verdict in a few lines; `frugal.planning.report.summary` has all of it."""
        notes = [f"{'note':<{NAME_WIDTH}}{note}" for note in self.warnings]
        rows = [f"{name:<{NAME_WIDTH - 1}} {words}" for name, words in self.verdict]
        return "\n".join([*notes, *([""] if notes else []), self.arithmetic, *rows])

    def _repr_html_(self) -> str:
        """Return the verdict for a notebook."""
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def verdict(self) -> tuple[tuple[str, str], ...]:
        """The plan in short, as rows with a name: what runs, its memory and time, and what binds."""
        request, model = self.request, self.model
        trained = ""
        if model.trainable_parameters != model.parameters:
            how = "" if request.lora is None else f", LoRA r={request.lora.rank}"
            how += "" if request.quantize is None else f", the others in {request.quantize}"
            trained = f" ({format_count(model.trainable_parameters)} trained{how})"
        samples = self.batch.global_batch if self.grouping is None else self.grouping.step_samples
        rows = (
            (
                "runs",
                f"{request.model}, {format_count(model.parameters)} parameters{trained}, {request.precision}: "
                f"{self.strategy}",
            ),
            ("fits", self._room),
            ("kernels", self.kernels),
            ("step", speed_in_words(self.time, samples)),
            ("rate", self._rate),
            ("binds", binds_in_short(self.why[-1]) if self.why else ""),
        )
        return tuple(row for row in rows if row[1])

    @property
    def kernels(self) -> str:
        """The kernels of this plan beyond torch's usual ones, and what they bring; empty: none."""
        kernels = (why.partition(";")[0] for why in self.why if why.startswith(KERNELS))
        return next(kernels, "").removeprefix(f"{KERNELS} ")

    @property
    def _room(self) -> str:
        memory, noun = self.memory, self.cluster.rank_noun
        differ = len(set(self.batch.micro_batch)) > 1 or len(self.cluster.kinds) > 1
        where = f"the fullest {noun}" if differ else f"each {noun}"
        is_offloaded = self.strategy.offload_optimizer != "none"
        host = f"; {format_bytes(memory.host_bytes_per_node)} of each host" if is_offloaded else ""
        return (
            f"{format_bytes(memory.total_bytes)} of {format_bytes(self.device_bytes)} on {where}, "
            f"{format_bytes(memory.headroom_bytes)} of headroom{host}"
        )

    @property
    def _rate(self) -> str:
        """Tokens/s, those of one device, and the MFU where the peak of all cards is known.

            MFU = FLOPs a token x tokens/s / sum of the cards' peak FLOP/s in the plan's precision

        This is the model FLOPs utilisation of PaLM (Chowdhery et al. 2022, appendix B), where forward and backward of a
        token take 6 N + 12 L H Q T FLOPs: N parameters that it meets, and attention in L layers of H heads of Q
        dimensions over T tokens. Here the FLOPs are those that the trace of the model counts, without what activation
        checkpointing repeats. They differ from the formula for frozen weights (4 instead of 6), embeddings that are
        looked up (none), and fused attention, whose backward computes its scores again (14 L H Q T): gpt2 with 1024
        tokens has 0.873 instead of 0.860 GFLOP a token. Left out, as there: causality, which halves attention; and that
        samples shorter than planned have less of it.
        """
        if self.model.task not in get_args(Task):  # samples of an own objective may be of anything
            return ""
        tokens_per_second, devices = self.step_tokens / self.time.total_seconds, self.cluster.devices
        a_device = f"{format_rate(tokens_per_second / len(devices))} a {self.cluster.rank_noun}"
        rate = f"{format_rate(tokens_per_second)} tokens/s, {a_device}"
        if any(device.name not in CARDS for device in devices):
            return f"{rate} (predicted)"
        flops_per_token = self.model.flops_per_sample / self.request.seq_len
        peaks = [CARDS[device.name].peak_flops(self.request.precision) for device in devices]
        share = flops_per_token * tokens_per_second / sum(peaks)
        peak = " + ".join(f"{number} x {each / 1e12:.4g}" for each, number in Counter(peaks).items())
        gigaflops = f"{flops_per_token / 1e9:.3g} GFLOP a token"
        return f"{rate}, MFU {100 * share:.1f} % (predicted: {gigaflops}, peak {peak} TFLOP/s)"

    @property
    def device_bytes(self) -> int:
        """The memory of the device that `memory` describes."""
        return self.memory.device_in(self.cluster).memory_bytes

    def sealed(self) -> "Plan":
        """Return the plan with its digest, in the types that it has when it is read: a whole number of seconds is a
        float.
        """
        as_read = msgspec.convert(msgspec.to_builtins(self), type(self))
        return replace(as_read, digest=as_read.compute_digest())

    def compute_digest(self) -> str:
        """Return the SHA-256 of the plan without its digest, hexadecimal."""
        return hashlib.sha256(msgspec.json.encode(replace(self, digest=""))).hexdigest()

    def to_json(self) -> bytes:
        """Return the text of `plan.json`."""
        return msgspec.json.format(self._compact_json(), indent=2) + b"\n"

    def _compact_json(self) -> bytes:
        is_short = self.batch.world_size * self.batch.accumulation_steps <= MAX_LISTED_SIZES
        return msgspec.json.encode(_compacted(msgspec.to_builtins(self), self.batch.sizes if is_short else None))

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Read the plan in a file.

        Raises:
            RequestError: no such file, no JSON, or not a plan.
            PlanMismatchError: another schema, or changed by hand.
        """
        with failure(f"cannot read the plan {path}", OSError, hint="make one with `frugal plan -o DIR`"):
            data = files.read_regular(path)
        return cls.from_json(data, source=str(path))

    @classmethod
    def from_json(cls, data: bytes, *, source: str = "plan.json") -> "Plan":
        """Return the plan in the text of a `plan.json`; `source` names it in messages. Raises as `read`."""
        hint = "make a new one with `frugal plan -o DIR`"
        try:
            raw = msgspec.json.decode(files.without_bom(data))
            if isinstance(raw, dict) and raw.get("schema", SCHEMA) != SCHEMA:
                raise PlanMismatchError(
                    f"{source} has schema {raw['schema']}, this frugal reads schema {SCHEMA}", hint=hint
                )
            plan = msgspec.convert(_expanded(raw), cls, strict=True)
        except RequestError as error:
            raise RequestError(f"{source} is not a plan", because=(error.what, *error.because), hint=hint) from None
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise RequestError(f"{source} is not a plan", because=str(error), hint=hint) from None
        except AssertionError as error:
            raise RequestError(
                f"{source} contradicts itself", because=str(error) or "its numbers do not agree", hint=hint
            ) from None
        has_more = msgspec.json.decode(plan._compact_json()) != raw  # keys that we do not know
        if has_more or plan.compute_digest() != plan.digest:
            raise PlanMismatchError(
                f"{source} was changed after it was made", because="its digest does not match its content", hint=hint
            )
        return plan


MAX_LISTED_SIZES = 8192
"""Micro-batch sizes that `plan.json` lists one by one."""


def _compacted(plan: dict[str, Any], sizes: tuple[tuple[int, ...], ...] | None) -> dict[str, Any]:
    """Return `plan` as it is written; `sizes` are those of its micro-batches, None where they are too many."""
    nodes: list[dict[str, Any]] = []
    for node in plan["cluster"]["nodes"]:
        if nodes and node == {name: value for name, value in nodes[-1].items() if name != "count"}:
            nodes[-1]["count"] += 1
        else:
            nodes.append({"count": 1, **node})
    batch = plan["batch"] | {"micro_batch_sizes": sizes}
    return plan | {"cluster": plan["cluster"] | {"nodes": nodes}, "batch": batch}


def _expanded(raw: Any) -> Any:
    """Undo `_compacted`. Anything else is left as it is, for the types to complain about."""
    cluster, batch = (raw.get(name) if isinstance(raw, dict) else None for name in ("cluster", "batch"))
    if not (isinstance(cluster, dict) and isinstance(batch, dict) and isinstance(cluster.get("nodes"), list)):
        return raw
    nodes = []
    for node in cluster["nodes"]:
        count = node.get("count") if isinstance(node, dict) else None
        if type(count) is int and 1 <= count <= MOST_RANKS:
            nodes += [{name: value for name, value in node.items() if name != "count"}] * count
        else:
            nodes.append(node)
    batch = {name: value for name, value in batch.items() if name != "micro_batch_sizes"}
    return raw | {"cluster": cluster | {"nodes": nodes}, "batch": batch}
