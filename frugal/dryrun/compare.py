"""A real run beside its dry run, as a record against which later versions can be checked, and a plan of other versions
beside a dry run with those installed. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from frugal import temporary
from frugal.config.hardware import local_host
from frugal.config.hardware.cluster import Cluster, Device
from frugal.config.request import Request
from frugal.distributed.rank_logs import to_console
from frugal.dryrun.client import DryRunSource
from frugal.dryrun.figures import Figures, figures
from frugal.dryrun.messages import DryRun
from frugal.dryrun.pool import Pool
from frugal.engine.measure.record import Capped, Measured, ModelDefinition
from frugal.errors import FrugalError, PlanMismatchError, RequestError
from frugal.planning.batch import BatchPlan
from frugal.planning.length_bucketing import most_samples
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.plan import Plan
from frugal.planning.search.evaluate import Fitting
from frugal.planning.strategy import Strategy
from frugal.report.records import read_history
from frugal.units import format_bytes

CPU_TOLERANCE = 0.005
"""The tolerated error of a prediction on CPU ranks, as a fraction of the measurement."""

CUDA_TOLERANCE, CUDA_LOW = 0.05, 0.02
"""The tolerated error on GPUs, and how much of it may be an underestimate."""

_LONG_SECONDS = 600.0
"""The duration of a run from which on the seconds of a dry run do not matter."""


def memory_as_run(
    plan: Plan, samples: int, tokens: int, device: Device | None = None, *, only_known: bool = False
) -> MemoryBreakdown | None:
    """Return the memory of a dry run of the plan with micro-batches of `samples` samples of `tokens` tokens (of one
    rank's part, where ranks share samples) on `device`; None: the smallest.

    `only_known`: None where it would have to be made; it takes seconds, in a process of its own.

    Raises:
        FrugalError: the model cannot be trained like that.
    """
    request = replace(plan.request, seq_len=tokens * plan.batch.sequence_parallel, lengths=None)
    steps = plan.batch.accumulation_steps
    with DryRunSource(request, plan.cluster, will_dry_run=False) as source:
        if only_known and not source.is_known(plan.strategy, samples, steps):
            return None
        return source.dry_run(plan.strategy, samples, steps, device)


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
    memory = min(filter(None, (memory_as_run(plan, *load) for load in loads)), key=lambda each: each.headroom_bytes)
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
    return replace(plan, frugal_version=here.pop("frugal"), versions=here, memory=memory, alternatives=()).sealed()


def as_run(plan: Plan, folder: Path) -> str | None:
    """Compare measured and predicted memory of the batches that ran, where these were smaller than planned (short
    samples); else None.

    After a short run only where such a dry run was made before.
    """
    try:
        history = read_history(folder)
        record = next((each for each in reversed(history.of("memory")) if each.measured_bytes), None)
        if record is None or not record.is_of_less or not record.largest_micro_batch or not record.measured_bytes:
            return None
        times = [each.time for each in (*history.others, *history.steps) if each.time is not None]
        is_short = max(times, default=0.0) - min(times, default=0.0) < _LONG_SECONDS
        samples, tokens = record.largest_micro_batch
        predicted = memory_as_run(plan, samples, tokens, only_known=is_short)
    except FrugalError:  # such as a model that cannot read samples that short; the run itself is done
        return None
    if predicted is None:
        return None
    difference = (record.measured_bytes / predicted.live_bytes - 1) * 100
    return (
        f"memory for {samples} x {tokens} tokens, the largest micro-batch of the first steps: predicted "
        f"{format_bytes(predicted.live_bytes)}, measured {format_bytes(record.measured_bytes)} ({difference:+.1f} %)"
    )


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
        """Return the relative error of the prediction."""
        return error(self.predicted, self.measured)

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
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.encode())
        except OSError as error:
            raise RequestError(f"cannot write to {folder}", because=str(error.strerror)) from None
        return path

    @classmethod
    def read(cls, path: Path) -> "Measurement":
        """Read the measurement in a file.

        Raises:
            RequestError: no such file, or no measurement.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise RequestError(f"cannot read the measurement {path}", because=str(error.strerror)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, AssertionError) as error:
            raise RequestError(f"{path} is not a measurement", because=str(error) or "its numbers disagree") from None


def predicted(dry_runs: Sequence[DryRun], cluster: Cluster, *, expandable_segments: bool = False) -> Figures:
    """Return the figures of a cluster's dry runs."""
    ranks_per_node = max(len(node.devices) for node in cluster.nodes)
    return figures(dry_runs, cluster.devices[0].kind, ranks_per_node, expandable_segments=expandable_segments)


def error(predicted: Figures, measured: Measured) -> float:
    """Return the relative error of a prediction; positive if more was predicted than measured."""
    return predicted.peak_allocated_bytes / measured.peak_allocated_bytes - 1


def host_bytes_per_node(predicted: Figures, cluster: Cluster) -> int:
    """Return the predicted growth of all processes of a node together, in bytes.

    On CPU ranks the device is the host: each rank grows by its live tensors. Left out: memory that malloc keeps.
    """
    if cluster.devices[0].kind == "cuda":
        return predicted.host_bytes_per_node
    return max(predicted.host_bytes_per_node, predicted.peak_allocated_bytes * len(cluster.nodes[0].devices))
