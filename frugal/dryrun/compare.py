"""A real run beside its dry run, as a record against which later versions can be checked, and a plan of other versions
beside a dry run with those installed; the figures of a dry run are its peaks. No torch here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from frugal import temporary
from frugal.config.hardware import local_host
from frugal.config.hardware.cluster import Cluster, Device, DeviceKind
from frugal.config.request import Request, Task
from frugal.distributed.rank_logs import to_console
from frugal.dryrun.client import DryRunSource
from frugal.dryrun.messages import DryRun
from frugal.dryrun.pool import Pool
from frugal.engine.measure.record import Capped, Measured, ModelDefinition
from frugal.errors import PlanMismatchError, failure
from frugal.planning.batch import BatchPlan
from frugal.planning.length_bucketing import most_samples
from frugal.planning.memory import breakdown
from frugal.planning.memory.allocator import Replays
from frugal.planning.memory.breakdown import Bounds, MemoryBreakdown, of_device, widened
from frugal.planning.plan import Plan
from frugal.planning.search.evaluate import Fitting
from frugal.planning.strategy import Strategy
from frugal.units import format_bytes


def memory_as_run(plan: Plan, samples: int, tokens: int, device: Device) -> MemoryBreakdown:
    """Return the memory of a dry run of the plan with micro-batches of `samples` samples of `tokens` tokens (of one
    rank's part, where ranks share samples) on `device`.

    Raises:
        FrugalError: the model cannot be trained like that.
    """
    request = replace(plan.request, seq_len=tokens * plan.batch.sequence_parallel, lengths=None)
    with DryRunSource(request, plan.cluster, will_dry_run=False) as source:
        return source.dry_run(plan.strategy, samples, plan.batch.accumulation_steps, device)


def proven_here(plan: Plan) -> Plan:
    """Return a plan that was made with other versions with the memory of dry runs with those installed.

    Where samples differ in length, both ends are dry-run: few of full length, and many of the shortest.

    Raises:
        FrugalError: the model cannot be trained like that with these versions.
        PlanMismatchError: the plan does not fit with them.
    """
    if not (others := local_host.other_versions(plan.all_versions)):
        return plan
    longest, shortest, parts = plan.request.seq_len, plan.batch.shortest, plan.batch.sequence_parallel
    loads = [
        (micro, longest // parts, device) for device, micro in Fitting(plan.request, plan.cluster).loads(plan.batch)
    ]
    if shortest is not None:
        loads += [(most_samples(micro, longest, shortest), shortest // parts, device) for micro, _, device in loads]
    memory = min((memory_as_run(plan, *load) for load in loads), key=lambda each: each.headroom_bytes)
    needed = f"{format_bytes(memory.total_bytes)} of {format_bytes(memory.device_in(plan.cluster).memory_bytes)}"
    if not memory.fits:
        raise PlanMismatchError(
            "the plan does not fit with the versions installed here",
            because=(
                others,
                f"a dry run with these needs {needed}; {format_bytes(plan.memory.total_bytes)} was planned",
            ),
            hint="make a new one with them: frugal plan -o DIR",
        )
    to_console(f"note: {others}; a dry run with these needs {needed}")
    here = local_host.versions()
    return replace(plan, frugal_version=here.pop("frugal"), versions=here, memory=memory).sealed()


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of the fullest rank, by phase and in total. Everything is in bytes.

    Attributes:
        peak_allocated_bytes: the most in live tensors; on CUDA in the allocator's blocks, as `max_memory_allocated`.
        peak_reserved_bytes: the most in the allocator's segments where nothing limits it, as `max_memory_reserved`.
        smallest_capacity_bytes: the least memory in which the step runs: a full device gives back cached segments.
        categories: bytes at the peak by category; the sum is `peak_allocated_bytes`.
        phases: the peak of each phase; the largest is `peak_allocated_bytes`.
        host_bytes_per_node: of a node with all its ranks: their tensors on the host, and their processes.
        operator: the one that allocates at the peak.
        phase: when the peak is.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    smallest_capacity_bytes: int
    categories: dict[str, int]
    phases: dict[str, int]
    host_bytes_per_node: int
    operator: str
    phase: str

    def __post_init__(self) -> None:
        assert sum(self.categories.values()) == self.peak_allocated_bytes == max(self.phases.values())


def fullest(dry_runs: Sequence[DryRun], kind: DeviceKind) -> DryRun:
    """Return the rank with the most bytes in live tensors."""
    return max(dry_runs, key=lambda dry_run: max(_phases(dry_run, kind).values()))


def predicted(dry_runs: Sequence[DryRun], cluster: Cluster, *, expandable_segments: bool = False) -> Figures:
    """Return the figures of a cluster's dry-run ranks: each the largest of any rank, the composition that of the
    fullest."""
    kind, ranks_per_node = cluster.devices[0].kind, max(len(node.devices) for node in cluster.nodes)
    phases = [_phases(dry_run, kind) for dry_run in dry_runs]
    allocated = max(max(each.values()) for each in phases)
    peak = fullest(dry_runs, kind).peak
    categories = dict(peak.categories)
    reserved = capacity = allocated
    if kind == "cuda":
        categories["rounding"] = allocated - peak.total_bytes
        replays = [_replays(dry_run, expandable_segments=expandable_segments) for dry_run in dry_runs]
        reserved = max(each.under().peak_reserved_bytes for each in replays)
        capacity = max(each.smallest_capacity() for each in replays)
    return Figures(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        smallest_capacity_bytes=capacity,
        categories=categories,
        phases={name: max(each[name] for each in phases) for name in phases[0]},
        host_bytes_per_node=breakdown.node_host_bytes(max(each.host_bytes for each in dry_runs), kind, ranks_per_node),
        operator=peak.operator,
        phase=peak.phase,
    )


def interval(figures: Figures, device: Device, assumptions: Sequence[str]) -> Bounds:
    """Return the bounds of the memory that `device` needs, its context included."""
    live = figures.peak_allocated_bytes - figures.categories.get("rounding", 0)
    bounds = of_device(live, figures.smallest_capacity_bytes, device)
    of_data = figures.categories["activations"] + figures.categories["temporary"]
    return widened(bounds, figures.smallest_capacity_bytes + device.context_bytes, of_data, assumptions)


def _replays(dry_run: DryRun, *, expandable_segments: bool = False) -> Replays:
    timeline = dry_run.timeline
    return Replays(timeline.fixed, timeline.events, timeline.empties, expandable_segments=expandable_segments)


def _phases(dry_run: DryRun, kind: DeviceKind) -> dict[str, int]:
    """Return the peak of each phase: live tensors, on CUDA in blocks. A CPU has no caching allocator."""
    timeline = dry_run.timeline
    if kind == "cuda":
        timeline = replace(timeline, fixed=_replays(dry_run).block_bytes())
    return timeline.phase_peaks(dry_run.micro_batch)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Two real optimizer steps beside their dry run, with everything that is needed to dry-run them again.

    `request.model` is the name by which `definition` is known. `command` is the one that measured it.
    """

    plan_digest: str
    request: Request
    definition: ModelDefinition
    cluster: Cluster
    strategy: Strategy
    batch: BatchPlan
    predicted: Figures
    measured: Measured
    capped: Capped | None = None
    device: str
    driver: str
    versions: dict[str, str]
    date: str
    command: str

    @property
    def kind(self) -> str:
        """Return `cpu` or `cuda`."""
        return self.cluster.devices[0].kind

    @property
    def error(self) -> float:
        """Return the relative error of the prediction; positive if more was predicted than measured."""
        return self.predicted.peak_allocated_bytes / self.measured.peak_allocated_bytes - 1

    @property
    def name(self) -> str:
        """Return a readable name, also for files: `gpt2-cpu-zero2-on-2-5d41402a`."""
        model = self.definition.factory or str((self.definition.config or {}).get("model_type", "model"))
        words = (model, self.kind, f"zero{self.strategy.zero_stage}", "on", str(self.batch.world_size))
        return "-".join((*words, self.plan_digest[:8]))

    def predict(self, pool: Pool | None = None) -> Figures:
        """Dry-run it again, from the definition alone and from no cache.

        Raises:
            FrugalError: the model cannot be made, or not be trained like that, any more.
        """
        with temporary.folder() as folder:
            reference = self.definition.write(folder)
            task = self.request.task if self.definition.task is None else self.definition.task
            request = replace(self.request, model=reference, task=task)
            with DryRunSource(request, self.cluster, cache=False, pool=pool) as source:
                dry_runs = source.dry_runs(self.strategy, self.batch.largest_micro_batch, self.batch.accumulation_steps)
        return predicted(dry_runs, self.cluster, expandable_segments=self.strategy.expandable_segments)

    def encode(self) -> bytes:
        """Return the text of the record."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def write(self, folder: Path) -> Path:
        """Write the record into `folder` and return the file.

        Raises:
            RequestError: the folder cannot be written to.
        """
        path = folder / f"{self.name}.json"
        with failure(f"cannot write to {folder}", OSError):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.encode())
        return path


def host_bytes_per_node(predicted: Figures, cluster: Cluster) -> int:
    """Return the predicted growth of all processes of a node together, in bytes.

    On CPU ranks the device is the host: each rank grows by its live tensors. Left out: memory that malloc keeps.
    """
    if cluster.devices[0].kind == "cuda":
        return predicted.host_bytes_per_node
    return max(predicted.host_bytes_per_node, predicted.peak_allocated_bytes * len(cluster.nodes[0].devices))


class Bytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of the fullest rank, each figure under the name that `frugal dryrun --json` has for it."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    phases: dict[str, int]
    context_bytes: int | None = None


class SharedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured run and what was predicted for it, as one small row that may be given away: nothing private.

    It has no text that a user chose: of a model's configuration its kind and its numbers, of a factory nothing; no name
    of a model, a host or a user, no path, no command, no digest.

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
