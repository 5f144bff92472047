"""Versions of DeepSpeed that silently compute wrong gradients, each with the thread that shows it.

`tests/deepspeed_adapter/test_known_faults.py` reproduces the threads on the version that is pinned.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

UNKNOWN = ""
"""A version that neither the thread nor DeepSpeed's history names."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of some versions of DeepSpeed.

    Attributes:
        thread: where it was found.
        since: the first version that has it; `UNKNOWN`: unknown; all versions before `until` may have it.
        until: the first version without it; `UNKNOWN`: not known.
        reported: versions that a thread names, where `until` is unknown.
        stages: of ZeRO that have it.
        what: how a gradient is wrong, and when.
        remedy: besides installing another version.
        needs: settings without which it does not show, of `half` (bf16), `accumulation`, `ranks` and `overlap`.
    """

    thread: str
    since: str
    until: str
    stages: tuple[int, ...]
    what: str
    remedy: str
    needs: frozenset[str] = frozenset()
    reported: tuple[str, ...] = ()

    def is_in(self, version: str) -> bool:
        """Return whether a version is known to have this fault."""
        if self.until == UNKNOWN:
            return version in self.reported
        return _numbers(self.since) <= _numbers(version) < _numbers(self.until)

    @property
    def versions(self) -> str:
        """Return the affected versions in words."""
        if self.until == UNKNOWN:
            return f"seen in {' and '.join(self.reported)}, fixed in: unknown"
        return (
            f"{f'from {self.since} to' if self.since else 'before'} {self.until}{', exclusive' if self.since else ''}"
        )


FAULTS = (
    Fault(
        thread="deepspeed#7718", since="0.17.6", until="0.18.3", stages=(2,), needs=frozenset({"accumulation"}),
        what="ZeRO-2 keeps the last micro-steps' gradients alone: norms of 1.63 for 4.74",
        remedy="ZeRO-3, or one accumulation step",
    ),
    Fault(  # the thread names no version of DeepSpeed; its symptom and date are those of #7718
        thread="accelerate#3877", since="0.17.6", until="0.18.3", stages=(2,), needs=frozenset({"accumulation"}),
        what="the loss under ZeRO-2 is higher the more accumulation steps a batch is cut into",
        remedy="ZeRO-3, or one accumulation step",
    ),
    Fault(  # since 7665; the thread says up to 0.19.3, and its fix (8245) is first in 0.19.6
        thread="deepspeed#8224", since="0.18.3", until="0.19.6", stages=(2,), needs=frozenset({"half", "ranks"}),
        what="ZeRO-2 with bf16 on several ranks loses a part of the gradient of a module that is used twice in a step",
        remedy="ZeRO-3, or use each module once in a step",
    ),
    Fault(
        thread="deepspeed#7837", since=UNKNOWN, until="0.18.6", stages=(0,), needs=frozenset({"half"}),
        what="ZeRO-0 with bf16 never clears gradients, and divides them by a loss scale that the loss did not have",
        remedy="ZeRO-2, also on one GPU",
    ),
    Fault(
        thread="deepspeed#6351", since=UNKNOWN, until=UNKNOWN, reported=("0.14.2", "0.14.5"), stages=(2,),
        needs=frozenset({"overlap", "ranks"}),
        what="with overlap_comm the result depends on reduce_bucket_size, and is NaN for a small one",
        remedy="overlap_comm: false",
    ),
    Fault(  # 6993 brought it, 7371 hid it
        thread="deepspeed#7188", since="0.17.2", until="0.17.5", stages=(1, 2), needs=frozenset({"overlap", "ranks"}),
        what="with overlap_comm a bucket is filled while it is being reduced",
        remedy="overlap_comm: false",
    ),
    Fault(
        thread="deepspeed#7965", since=UNKNOWN, until="0.19.0", stages=(1, 2), needs=frozenset({"overlap", "ranks"}),
        what="with overlap_comm buffers are used again before they were reduced: a loss of NaN under ZeRO-2",
        remedy="overlap_comm: false",
    ),
)  # fmt: skip


def of_version(version: str) -> Iterator[Fault]:
    """Yield the faults that a version of DeepSpeed is known to have; none where it is not installed."""
    if re.match(r"\d", version):
        yield from (fault for fault in FAULTS if fault.is_in(version))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, in order; `0.19.8+cu12` has those of 0.19.8, `UNKNOWN` none."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
