"""Memory ran out: whether an error says so, what it tells of the device, and the words for it."""

import re
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from frugal.units import format_bytes

_SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to CUDA calloc")
UPDATE = "the optimizer step"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_REQUEST = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB|TiB)")
_OTHERS_CODE = ("torch", "deepspeed", "contextlib.py", "functools.py")


@dataclass(frozen=True)
class Report:
    """What one rank that ran out of memory knows.

    Attributes:
        rank: which one.
        request_bytes: what it had asked for; None where the error does not say.
        allocated_bytes: what its tensors took.
        reserved_bytes: what torch's allocator held of the device for them; 0 on the host, which has no such allocator.
        phase: forward, backward, the optimizer step or evaluation.
        where: the line of code that asked.
    """

    rank: int
    request_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    phase: str
    where: str

    @property
    def is_fragmentation(self) -> bool:
        """Whether enough was free inside what the allocator held, only not in one piece."""
        return self.request_bytes is not None and self.reserved_bytes - self.allocated_bytes >= self.request_bytes

    def __str__(self) -> str:
        asked = "could not be given memory" if self.request_bytes is None else (
            f"asked for {format_bytes(self.request_bytes)}"
        )  # fmt: skip
        held = f" with {format_bytes(self.allocated_bytes)} of {format_bytes(self.reserved_bytes)} in use"
        return f"rank {self.rank} {asked}{held if self.reserved_bytes else ''} in {self.phase}, {self.where}"


@dataclass(frozen=True)
class Shortage:
    """Memory ran out on some ranks; the same on all of them."""

    reports: tuple[Report, ...]

    @property
    def is_fragmentation(self) -> bool:
        """Whether the same work may go well once the allocators have given back what they held."""
        return all(report.is_fragmentation for report in self.reports)

    @property
    def is_in_update(self) -> bool:
        """Whether it was in the optimizer step."""
        return any(report.phase == UPDATE for report in self.reports)

    def beyond(self, planned_bytes: int) -> Report | None:
        """A single request for more than everything together was planned to take: a mistake, not a tight fit."""
        for report in self.reports:
            if planned_bytes and (report.request_bytes or 0) > planned_bytes:
                return report
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on the device, on the host or inside cuBLAS or NCCL."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    )


def report(error: BaseException, rank: int) -> Report:
    """What this rank has to say of `error`, before what it held is given back."""
    found = _REQUEST.search(str(error))
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    frames = traceback.extract_tb(error.__traceback__)
    return Report(
        rank=rank,
        request_bytes=None if found is None else int(float(found[1]) * _UNITS[found[2]]),
        allocated_bytes=torch.cuda.memory_allocated() if on_gpu else 0,
        reserved_bytes=torch.cuda.memory_reserved() if on_gpu else 0,
        phase=_phase(frames),
        where=_where(frames),
    )


def _phase(frames: traceback.StackSummary) -> str:
    files = {Path(frame.filename).name for frame in frames if Path(frame.filename).parent == Path(__file__).parent}
    if "update.py" in files:
        return UPDATE
    if "evaluate.py" in files:
        return "evaluation"
    return "backward" if any(frame.name == "backward" for frame in frames) else "forward"


def _where(frames: traceback.StackSummary) -> str:
    """The innermost line that is neither torch's nor DeepSpeed's."""
    own = [frame for frame in frames if not set(Path(frame.filename).parts) & set(_OTHERS_CODE)] or list(frames)
    if not own:
        return "nobody knows where"
    return f"{'/'.join(Path(own[-1].filename).parts[-2:])}:{own[-1].lineno} ({own[-1].name})"
