"""Rows and sums of `bench/gpu/truth.py`. An error is how much more was predicted than measured, as a share of that."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.gpu.predictions import Prediction
from bench.gpu.worker import Answer

CAPPED_EXPANDABLE = "expandable capped"
TOO_HIGH = 0.20  # from here on an estimate wastes a card
CPU_LOW = 0.002  # on a CPU, where nothing can be capped, an estimate this much too low counts as unusable


@dataclass(frozen=True)
class Finished:
    """One run that is over, and what its allocator was allowed."""

    cap_bytes: int | None
    answer: Answer


@dataclass
class Row:
    """One configuration and its runs: `free`, `capped`, `capped x 1.02`, `expandable`, `expandable capped`.

    `capacity_bytes`: the least for segments in which the requests of the free run are granted, those of cuBLAS among
    them, by the allocator's model, which comes to the measured peaks on the same requests.
    """

    prediction: Prediction
    runs: dict[str, Finished] = field(default_factory=dict)
    failure: str | None = None
    capacity_bytes: int = 0

    @classmethod
    def read(cls, content: dict[str, Any]) -> "Row":
        """The row that `content` was made of."""
        runs = msgspec.convert(content["runs"], dict[str, Finished])
        prediction = msgspec.convert(content["prediction"], Prediction)
        return cls(prediction, runs, content["failure"], content["capacity_bytes"])

    @property
    def measured(self) -> int:
        """Bytes allocated at the peak; 0 where the run failed."""
        answer = self._answer("free")
        return 0 if answer is None else max(answer.phases.values())

    @property
    def error(self) -> float | None:
        """The error of the allocated bytes."""
        figures = self.prediction.figures
        return figures.peak_allocated_bytes / self.measured - 1 if figures is not None and self.measured else None

    @property
    def reserved_error(self) -> float | None:
        """The error of the reserved bytes. None where the device is too small for all segments: then some are given
        back."""
        figures, answer = self.prediction.figures, self._answer("free")
        if figures is None or answer is None or "reserved_bytes" not in answer.of_gpu:
            return None
        if figures.peak_reserved_bytes > 0.9 * answer.of_gpu["device_bytes"]:
            return None
        return figures.peak_reserved_bytes / answer.of_gpu["reserved_bytes"] - 1

    @property
    def expandable_error(self) -> float | None:
        """The error of the reserved bytes with expandable segments."""
        answer = self._answer("expandable")
        if answer is None:
            return None
        found = answer.of_gpu["reserved_bytes"]
        return self.prediction.expandable_reserved_bytes / found - 1

    @property
    def waste(self) -> float | None:
        """By how much the promise is more than what the run needs, as a share of that; below 0: it is not enough."""
        if "capped" not in self.runs or not self.capacity_bytes:
            return None
        return (self.runs["capped"].cap_bytes or 0) / self.capacity_bytes - 1

    @property
    def usable(self) -> bool | None:
        """True if the run went through when capped at the estimate; on a CPU whether the estimate was enough."""
        if "capped" in self.runs:
            finished = self.runs["capped"].answer
            return None if finished.failure is not None else finished.survived
        if self.error is None or self.runs["free"].answer.of_gpu:
            return None
        return self.error >= -CPU_LOW

    @property
    def expandable_usable(self) -> bool | None:
        """The same with expandable segments."""
        finished = self.runs.get(CAPPED_EXPANDABLE)
        return None if finished is None or finished.answer.failure is not None else finished.answer.survived

    def error_of(self, peer: str) -> float:
        """Return the error of a peer's estimate of the same."""
        return float(getattr(self.runs["free"].answer, peer) / self.measured - 1)

    def content(self) -> dict[str, Any]:
        """For the file."""
        return {
            "name": self.prediction.configuration.name,
            "family": self.prediction.configuration.family,
            "prediction": msgspec.to_builtins(self.prediction),
            "runs": msgspec.to_builtins(self.runs),
            "failure": self.failure,
            "measured_bytes": self.measured,
            "error": self.error,
            "reserved_error": self.reserved_error,
            "expandable_error": self.expandable_error,
            "capacity_bytes": self.capacity_bytes,
            "waste": self.waste,
            "usable": self.usable,
        }

    def line(self, what: str = "free") -> str:
        """One run in one line."""
        head = f"{self.prediction.configuration.name:<60} {what:<13}"
        if what not in self.runs:
            return f"{head} {self.failure or 'not run: time was up'}"
        finished = self.runs[what]
        answer = finished.answer
        if answer.failure is not None:
            return f"{head} failed: {answer.failure}"
        if finished.cap_bytes is not None:
            return f"{head} {finished.cap_bytes:>16,} {'enough' if answer.survived else 'OUT OF MEMORY'}"
        if not answer.survived:
            return f"{head} OUT OF MEMORY"
        error = self.error if what == "free" else self.expandable_error
        figures = self.prediction.figures
        assert figures is not None
        predicted = figures.peak_allocated_bytes if what == "free" else self.prediction.expandable_reserved_bytes
        return f"{head} {predicted:>16,} {error or 0.0:>+9.3%}  {answer.seconds:5.1f} s"

    def _answer(self, what: str) -> Answer | None:
        """Return the answer of a run that went well."""
        finished = self.runs.get(what)
        return finished.answer if finished is not None and finished.answer.phases else None


def quantiles(errors: Sequence[float]) -> dict[str, float]:
    """Return quantiles of absolute values, but for the lowest."""
    sizes = sorted(map(abs, errors))
    if not sizes:
        return {}
    return {
        "median": statistics.median(sizes),
        "p95": sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))],
        "worst": sizes[-1],
        "lowest": min(errors),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """All rows in a few numbers; shares of the configurations measured."""
    measured = [row for row in rows if row.measured]
    verdicts = [row.usable for row in measured if row.usable is not None]
    expandable = [row.expandable_usable for row in measured if row.expandable_usable is not None]
    peers = {
        "DeepSpeed estimate_zero*_model_states_mem_needs": "deepspeed_bytes",
        "accelerate estimate-memory": "accelerate_bytes",
    }
    return {
        "configurations": len(rows),
        "measured": len(measured),
        "families": len({row.prediction.configuration.family for row in measured}),
        "largest_parameters": max((row.prediction.parameters for row in measured), default=0),
        "failures": sum(row.failure is not None or any(f.answer.failure for f in row.runs.values()) for row in rows),
        "allocated_error": quantiles([row.error for row in measured if row.error is not None]),
        "reserved_error": quantiles([row.reserved_error for row in measured if row.reserved_error is not None]),
        "expandable_error": quantiles([row.expandable_error for row in measured if row.expandable_error is not None]),
        "waste": quantiles([row.waste for row in measured if row.waste is not None]),
        "capped": len(verdicts),
        "unusable_share": sum(not usable for usable in verdicts) / len(verdicts) if verdicts else None,
        "expandable_capped": len(expandable),
        "expandable_unusable_share": sum(not usable for usable in expandable) / len(expandable) if expandable else None,
        "too_high_share": _share([row.error or 0.0 for row in measured], lambda error: error > TOO_HIGH),
        "peers": {name: _peer(measured, attribute) for name, attribute in peers.items()},
        "attention": _attention(measured),
    }


def _peer(rows: Sequence[Row], attribute: str) -> dict[str, float]:
    """A peer's errors. What is less than was allocated could not have been enough."""
    errors = [row.error_of(attribute) for row in rows]
    found = quantiles(errors)
    return found | {"too_low_share": _share(errors, lambda error: error < 0)} if found else {}


def _share(values: Sequence[float], holds: Any) -> float:
    return sum(map(holds, values)) / len(values) if values else 0.0


def _attention(rows: Sequence[Row]) -> dict[str, Any]:
    """Kernels that CUDA chose where a dry run would assume others."""
    seen = {each for row in rows for finished in row.runs.values() for each in finished.answer.attention}
    others = [each for each in sorted(seen) if each.kernel != each.predicted]
    return {"kinds": len(seen), "other_kernel": msgspec.to_builtins(others)}


def table(rows: Sequence[Row]) -> list[str]:
    """The sums, and what failed, for people."""
    found = summary(rows)
    lines = [f"{found['measured']} of {found['configurations']} configurations, {found['families']} families"]
    names = ("median", "p95", "worst", "lowest")
    lines.append(f"{'error of':<50}" + "".join(f"{name:>10}" for name in names))
    ours = {"allocated": "allocated_error", "reserved": "reserved_error", "reserved, expandable": "expandable_error"}
    ours["promise over what was needed"] = "waste"
    errors = {name: found[key] for name, key in ours.items()} | found["peers"]
    for name, each in errors.items():
        if each:
            lines.append(f"{name:<50}" + "".join(f"{each[key]:>+10.2%}" for key in names))
    if found["unusable_share"] is not None:
        lines.append(f"unusable: {found['unusable_share']:.1%} of {found['capped']}")
    if found["expandable_unusable_share"] is not None:
        lines.append(f"unusable, expandable: {found['expandable_unusable_share']:.1%} of {found['expandable_capped']}")
    lines.append(f"more than {TOO_HIGH:.0%} too high: {found['too_high_share']:.1%}")
    lines += [
        f"{name}: less than was allocated in {each['too_low_share']:.0%}"
        for name, each in found["peers"].items()
        if each
    ]
    lines.append(
        f"attention: {found['attention']['kinds']} kinds, {len(found['attention']['other_kernel'])} other than assumed"
    )
    missing = [row for row in rows if not row.measured]
    return lines + [row.line() for row in missing]
