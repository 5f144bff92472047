"""`python -m bench.gpu.truth`: predicted memory against a real GPU, in one call of under ten minutes.

On a machine with a CPU:      python -m bench.gpu.truth --predict predictions.json --card h200-141g
On the machine with the GPU:  python -m bench.gpu.truth --predictions predictions.json --minutes 9
Without predictions they are made first, on the same machine, which takes some minutes of its cores. With --record
tests/measured the small models become records, against which predictions are tested for ever without a GPU. With
--go-on RESULT the runs are made that an earlier result lacks, and those capped at another promise.

Needs on both: torch, deepspeed, transformers, accelerate, msgspec, click, rich, psutil, platformdirs, numpy.

Each configuration is dry-run on meta tensors, then runs for two optimizer steps of frugal's engine, then again with
the caching allocator capped at the predicted capacity, and some a third time with expandable segments. Several run at
once in processes of their own, where their predictions say that they fit together: allocators do not see each other.
The context is measured before, alone.

What is compared: the peaks of `torch.cuda.max_memory_allocated` and `max_memory_reserved`. An estimate is unusable,
as with xMem (Middleware '25), if the run capped at it runs out of memory; beside it the share of those that are more
than 20 % too high, which would waste a card. The peers' estimates are arithmetic over the number of parameters, and
get no run of their own.
"""

import argparse
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench.gpu.configurations import configurations, device
from bench.gpu.predictions import Prediction, predict
from bench.gpu.process import Process, Traits
from bench.gpu.records import records
from bench.gpu.report import CAPPED_EXPANDABLE, Finished, Row, summary, table
from bench.gpu.streams import Stream
from bench.gpu.worker import Answer, Constants, Run
from frugal.config.hardware import local_host
from frugal.config.hardware.cluster import Device, DeviceKind, find_card, of_driver
from frugal.units import MIB, parse_bytes

RESULTS = Path(__file__).parents[1] / "results"
SHARE = 0.95  # of a device's memory that runs may take together
LONGER = (1.01, 1.02, 1.05, 1.10)  # where a capped run fails: by how much the cap is raised
NEAR = 4  # from so many runs at the head of the queue one is chosen for which no process need be started
EXPANDABLE = 8  # so many configurations run with expandable segments, too
LAST_SECONDS = 40.0  # before the end nothing new is begun
ASSUMED_CONTEXT = 512 * MIB


@dataclass
class Bench:
    """Runs that share a device.

    Attributes:
        deadline, limit: when nothing new begins, and when all must have ended.
        expandable_runs: so many configurations run with expandable segments, too.
        streams: the folder for what was asked of the allocator; None: that is not kept.
    """

    kind: DeviceKind
    folder: Path
    device_bytes: int
    deadline: float
    limit: float
    rows: list[Row] = field(default_factory=list)
    out: Path | None = None
    head: dict[str, Any] = field(default_factory=dict)
    expandable_runs: int = EXPANDABLE
    streams: Path | None = None
    _queue: list[tuple[Row, Run, str]] = field(default_factory=list)
    _taken: int = 0
    _running: int = 0
    _expandable: int = 0
    _lock: threading.Condition = field(default_factory=threading.Condition)

    def add(self, prediction: Prediction, row: Row | None = None) -> None:
        """A configuration to measure, if it can fit. `row`: what is known of it already, but for the prediction."""
        if row is None:
            row = Row(prediction)
            self.rows.append(row)
        row.prediction, row.failure = prediction, None
        if prediction.figures is None:
            row.failure = f"not predicted: {prediction.failure}"
        elif prediction.figures.smallest_capacity_bytes + ASSUMED_CONTEXT > SHARE * self.device_bytes:
            row.failure = "too large for this device"
        else:
            run = Run(
                configuration=prediction.configuration,
                parameters=prediction.parameters,
                trainable_parameters=prediction.trainable_parameters,
                largest_parameter=prediction.largest_parameter,
                folder=str(self.folder),
                ranks=prediction.ranks,
                keeps_requests=self.kind == "cuda",
            )
            if row.measured:
                self._go_on(row, run)
            else:
                self._queue.append((row, run, "free"))

    def _go_on(self, row: Row, run: Run) -> None:
        """The runs that are missing. What was capped at another promise, or failed, runs again."""
        free = row.runs["free"].answer
        capped = row.runs.get("capped")
        if capped is None or capped.answer.failure is not None or capped.cap_bytes != self._promise(row):
            row.runs = {what: each for what, each in row.runs.items() if "capped" not in what}
        self._follow(row, run, "free", free)

    @staticmethod
    def _promise(row: Row) -> int:
        """Return what the allocator may take."""
        assert row.prediction.figures is not None
        return row.prediction.figures.smallest_capacity_bytes

    def work(self, num_processes: int) -> None:
        """Measure what is in the queue, several at once, until it is empty or time is up."""
        threads = [threading.Thread(target=self._one_after_another) for _ in range(num_processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _one_after_another(self) -> None:
        process: Process | None = None
        while (job := self._next(process)) is not None:
            row, run, what = job
            if process is None or process.traits != _traits(job):
                if process is not None:
                    process.end()
                process = Process(self.kind, _traits(job))
            answer = process.ask(run, seconds=max(1.0, self.limit - time.monotonic()))
            if not answer.clean:
                process.end()
                process = None
            self._done(row, run, what, answer)
        if process is not None:
            process.end()

    def _next(self, process: Process | None) -> tuple[Row, Run, str] | None:
        """The first that fits beside what runs; rather one for which the process need not be changed."""
        with self._lock:
            while (self._queue or self._running) and time.monotonic() < self.deadline:
                room = SHARE * self.device_bytes - self._taken
                fitting = [job for job in self._queue if self._need(job) <= room or not self._running][:NEAR]
                if fitting:
                    same = [job for job in fitting if process is not None and process.traits == _traits(job)]
                    job = (same or fitting)[0]
                    self._queue.remove(job)
                    self._taken += self._need(job)
                    self._running += 1
                    return job
                self._lock.wait(timeout=1.0)  # what runs makes room, and may add to the queue
            return None

    @staticmethod
    def _need(job: tuple[Row, Run, str]) -> int:
        """A run without a cap takes all segments that it can get. An emulated card is each process's own."""
        if job[1].configuration.card is not None:
            return 0
        figures = job[0].prediction.figures
        assert figures is not None
        return ASSUMED_CONTEXT + (job[1].cap_bytes or figures.peak_reserved_bytes)

    def _done(self, row: Row, run: Run, what: str, answer: Answer) -> None:
        with self._lock:
            self._taken -= self._need((row, run, what))
            self._running -= 1
            row.runs[what] = Finished(cap_bytes=run.cap_bytes, answer=answer)
            if self.kind == "cuda" and answer.failure is None:
                self._follow(row, run, what, answer)
            self._read_streams(row, run, what, answer)
            self._keep()
            print(row.line(what), flush=True)
            self._lock.notify_all()

    def _follow(self, row: Row, run: Run, what: str, answer: Answer) -> None:
        """After a free run one at the cap; where that fails, at a higher one; for some, one in expandable segments."""
        if what == "free" and answer.survived:
            if "capped" not in row.runs:
                cap = self._promise(row)
                self._queue.insert(0, (row, msgspec.structs.replace(run, cap_bytes=cap), "capped"))
            if self._expandable < self.expandable_runs and "expandable" not in row.runs:
                self._expandable += 1
                self._queue.append((row, run, "expandable"))
        elif what == "expandable" and answer.survived and (cap := row.prediction.expandable_capacity_bytes):
            self._queue.insert(0, (row, msgspec.structs.replace(run, cap_bytes=cap), CAPPED_EXPANDABLE))
        elif what.startswith("capped") and not answer.survived and run.cap_bytes is not None:
            tried = sum(name.startswith("capped") for name in row.runs)
            if tried <= len(LONGER):
                raised = LONGER[tried - 1]
                cap = int((row.runs["capped"].cap_bytes or 0) * raised)
                self._queue.insert(0, (row, msgspec.structs.replace(run, cap_bytes=cap), f"capped x {raised:.2f}"))

    def _read_streams(self, row: Row, run: Run, what: str, answer: Answer) -> None:
        """Return what the run asked of the allocator: kept if that is wanted, and the least it needs."""
        for file in answer.requests:
            path = Path(file)
            requests = msgspec.json.decode(path.read_bytes())
            path.unlink()
            stream = Stream(
                name=run.configuration.name,
                device=run.configuration.card or self.head["device"],
                is_emulated=run.configuration.card is not None,
                versions=self.head["versions"],
                date=self.head["date"],
                command=self.head["command"],
                world_size=run.configuration.world_size,
                expandable_segments=what.startswith("expandable"),
                cap_bytes=run.cap_bytes,
                **requests,
            )
            if what == "free":
                row.capacity_bytes = max(row.capacity_bytes, stream.replays().smallest_capacity(tolerance=0.001))
            if self.streams is not None and run.cap_bytes is None:
                stream.write(self.streams)

    def _keep(self) -> None:
        """Write what there is, so that a run that is ended from outside leaves it."""
        if self.out is None:
            return
        content = self.head | {"summary": summary(self.rows), "rows": [row.content() for row in self.rows]}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")


def _traits(job: tuple[Row, Run, str]) -> Traits:
    """Return the traits of the process that a run needs."""
    configuration = job[1].configuration
    is_expandable = job[2].startswith("expandable")
    return Traits(configuration.zero_stage == 3, is_expandable, configuration.world_size, configuration.card)


def main() -> int:
    """Predict, or measure and compare; 1 if nothing was measured."""
    start = time.monotonic()
    asked = _arguments()
    kind: DeviceKind = asked.device
    chosen = list(configurations(kind))[: asked.first]
    with TemporaryDirectory(prefix="gpu-truth-") as name:
        folder = Path(name)
        if asked.predict is not None:
            found = list(told(predict(chosen, _expected(kind, asked), folder)))
            asked.predict.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
            return int(any(each.failure for each in found))
        with _measuring(kind) as (constants, device_name):
            here = _found(constants) if constants else _expected(kind, asked)
            old = msgspec.json.decode(asked.go_on.read_bytes())["rows"] if asked.go_on is not None else []
            rows = [Row.read(content) for content in old]
            if asked.predictions is not None:
                found = msgspec.json.decode(asked.predictions.read_bytes(), type=list[Prediction])[: asked.first]
            else:
                found = list(told(predict(chosen, here, folder)))
            bench = Bench(
                kind=kind,
                folder=folder,
                device_bytes=here.memory_bytes,
                rows=rows,
                deadline=start + 60 * asked.minutes - LAST_SECONDS,
                limit=start + 60 * asked.minutes - LAST_SECONDS / 8,
                out=asked.out or RESULTS / f"gpu-truth-{device_name.lower().replace(' ', '-')}.json",
                head=environment(device_name, kind) | {"constants": constants},
                streams=asked.streams,
            )
            known = {row.prediction.configuration.name: row for row in rows}
            for each in found:
                bench.add(each, known.get(each.configuration.name))
            bench.work(asked.processes or (3 if kind == "cuda" else 1))
            if asked.record is not None:
                for record in records(bench.rows, here, bench.head, folder):
                    print(f"recorded {record.write(asked.record)}")
    print("\n" + "\n".join(table(bench.rows)))
    if constants:
        print(f"\nconstants: {msgspec.json.encode(constants).decode()}")
    print(f"\nwrote {bench.out}")
    return int(not any(row.measured for row in bench.rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.truth", description="Predictions against a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="when to be done  [default: 9]")
    parser.add_argument("--predict", type=Path, metavar="FILE", help="only predict, into this file")
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="predictions made before")
    parser.add_argument("--memory", type=parse_bytes, help="of the GPU, for --predict  [default: the card's]")
    parser.add_argument("--card", type=find_card, default="a100-80g", help="that GPU  [default: a100-80g]")
    parser.add_argument("--go-on", type=Path, metavar="RESULT", help="keep the runs of an earlier result")
    parser.add_argument("--processes", type=int, help="that share the GPU  [default: 3, on a CPU 1]")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N configurations")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep small models as records: tests/measured")
    parser.add_argument("--streams", type=Path, metavar="FOLDER", help="keep what was asked of the allocator")
    parser.add_argument("--out", type=Path, help="[default: bench/results/gpu-truth-DEVICE.json]")
    return parser.parse_args()


def _expected(kind: DeviceKind, asked: argparse.Namespace) -> Device:
    """The device of the command line."""
    return device(kind, asked.memory or asked.card.memory_bytes, asked.card)


def _found(constants: Mapping[str, Any]) -> Device:
    """The GPU of this machine."""
    major, minor = map(int, constants["compute_capability"].split("."))
    card = of_driver(constants["device"], (major, minor), constants["resident_threads"])
    return device("cuda", constants["device_bytes"], card)


def told(predictions: Iterator[Prediction]) -> Iterator[Prediction]:
    """The same, each printed when it is made."""
    for each in predictions:
        size = f"{each.figures.peak_allocated_bytes:>16,}" if each.figures is not None else f"failed: {each.failure}"
        print(f"predicted {each.configuration.name:<60} {size}  {each.seconds:5.1f} s", flush=True)
        yield each


@contextmanager
def _measuring(kind: DeviceKind) -> Iterator[tuple[dict[str, Any], str]]:
    """The device's constants, measured while nothing else runs on it, and its name."""
    if kind == "cpu":
        yield {}, "cpu"
        return
    process = Process(kind, Traits())
    try:
        answer = process.ask(Constants(), seconds=120)
    finally:
        process.end()
    if answer.constants is None:
        raise SystemExit(f"error: the GPU cannot be measured\n  because {answer.failure}")
    yield answer.constants, str(answer.constants["device"])


def environment(device_name: str, kind: DeviceKind, program: str = "bench.gpu.truth") -> dict[str, Any]:
    """Return on what was measured, with what, when and by which command."""
    versions = {"python": platform.python_version()}
    for name in ("frugal-trainer", "torch", "deepspeed", "transformers", "accelerate"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join([f"python -m {program}", *sys.argv[1:]]),
        "device": device_name if kind == "cuda" else local_host.cpu_name(),
        "driver": local_host.cuda_driver() if kind == "cuda" else "",
        "versions": versions,
    }


if __name__ == "__main__":
    sys.exit(main())
