"""What fills a device at its fullest moment."""

from dataclasses import dataclass, field, fields


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Bytes on one device at the peak, by category, and on one node's host.

    `slack` is what the caching allocator needs beyond the live tensors: rounding and blocks that do not fit the next
    request. `context` is what is gone before the first tensor. `phase` says when the peak occurs, `operator` what
    allocates there. `phase_peaks` has the most live bytes of each phase; only a rehearsal fills it in.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    communication: int
    temporary: int
    slack: int
    context: int
    total_bytes: int
    usable_bytes: int
    host_bytes_per_node: int
    phase: str
    operator: str
    phase_peaks: dict[str, int] = field(default_factory=dict)

    CATEGORIES = (
        "parameters", "gradients", "optimizer", "activations", "logits",
        "communication", "temporary", "slack", "context",
    )  # fmt: skip

    def __post_init__(self) -> None:
        assert self.total_bytes == sum(getattr(self, name) for name in self.CATEGORIES), "the parts are not the whole"
        assert all(getattr(self, f.name) >= 0 for f in fields(self) if f.name in self.CATEGORIES), self

    @property
    def live_bytes(self) -> int:
        """Bytes of live tensors at the peak: without slack and context."""
        return self.total_bytes - self.slack - self.context

    @property
    def headroom_bytes(self) -> int:
        """What is left of the usable memory; negative: the shortfall. `usable_bytes` does not contain the context."""
        return self.usable_bytes - (self.total_bytes - self.context)

    @property
    def fits(self) -> bool:
        """Whether the device holds it."""
        return self.headroom_bytes >= 0
