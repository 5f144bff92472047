"""What one micro-step of a model makes a device do, whatever the device: counted, not timed."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Line:
    """A number for every micro-batch: what is there without any sample, and what each sample adds."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: int) -> float:
        """For so many samples."""
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True, kw_only=True)
class Work:
    """One micro-step, samples of full length. What DeepSpeed adds is not part of it.

    Traffic are the bytes read and written by operators whose FLOPs are not counted: pointwise ones, norms, softmax,
    copies, gathers. They take as long as their bytes; matrix products and attention as long as their FLOPs. On a CPU
    bytes are weighed by what is computed with them, see `frugal.training.traffic`.

    Attributes:
        flops_per_sample: FLOPs of forward and backward, without recomputation.
        recompute_flops_per_sample: FLOPs of the forward that activation checkpointing repeats.
        traffic: bytes of forward and backward, without recomputation.
        recompute_traffic: bytes of what is repeated.
        num_operators: operators of all of it; `num_recomputed` of them repeat, `num_forward` are the forward's.
        moved_per_sample: bytes of activations that go to the host, and come back.
    """

    flops_per_sample: float
    recompute_flops_per_sample: float
    traffic: Line
    recompute_traffic: Line
    num_operators: int
    num_forward: int
    num_recomputed: int
    moved_per_sample: float


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The same of one micro-step of a known number of samples, as recorded."""

    flops: int = 0
    recompute_flops: int = 0
    traffic: int = 0
    recompute_traffic: int = 0
    num_operators: int = 0
    num_forward: int = 0
    num_recomputed: int = 0
    moved: int = 0

    def plus(self, other: "Counts", times: int = 1) -> "Counts":
        """With `other` so many times more."""
        return Counts(**{f.name: getattr(self, f.name) + times * getattr(other, f.name) for f in fields(self)})

    def minus(self, other: "Counts") -> "Counts":
        """Without `other`."""
        return self.plus(other, -1)

    def divided(self, number: int) -> "Counts":
        """Of each of so many micro-steps."""
        return Counts(**{f.name: getattr(self, f.name) // number for f in fields(self)})


def between(first: Counts, second: Counts, num_samples: tuple[int, int]) -> Work:
    """The line through two micro-steps of so many samples."""
    small, large = num_samples

    def slope(name: str) -> float:
        return float(getattr(second, name) - getattr(first, name)) / (large - small)

    def line(name: str) -> Line:
        per_sample = max(0.0, slope(name))
        return Line(max(0.0, getattr(first, name) - per_sample * small), per_sample)

    return Work(
        flops_per_sample=slope("flops"),
        recompute_flops_per_sample=slope("recompute_flops"),
        traffic=line("traffic"),
        recompute_traffic=line("recompute_traffic"),
        num_operators=first.num_operators,
        num_forward=first.num_forward,
        num_recomputed=first.num_recomputed,
        moved_per_sample=slope("moved"),
    )
