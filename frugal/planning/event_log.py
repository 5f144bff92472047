"""A stream of births, deaths and phases while it is written, see `frugal.planning.timeline`."""

from collections.abc import Iterable

from frugal.planning.timeline import Recording


class EventLog:
    """Everything so far; the fields are those of a `Recording`, and whoever writes may add to them."""

    def __init__(self, names: Iterable[str] = ("",)) -> None:
        """`names`: operators and modules that have a number already."""
        self.sizes: list[int] = []
        self.categories: list[int] = []
        self.operators: list[int] = []
        self.modules: list[int] = []
        self.names = {name: number for number, name in enumerate(names)}
        self.events: list[int] = []
        self.phases: list[tuple[str, int]] = []

    def phase(self, name: str) -> None:
        """From now on it is this phase."""
        self.phases.append((name, len(self.events)))

    def born(self, size_bytes: int, category: int, operator: str, module: str = "") -> int:
        """A storage begins; its index."""
        index = len(self.sizes)
        self.sizes.append(size_bytes)
        self.categories.append(category)
        self.operators.append(self.names.setdefault(operator, len(self.names)))
        self.modules.append(self.names.setdefault(module, len(self.names)))
        self.events.append(index)
        return index

    def recording(self, micro_batch: int) -> Recording:
        """What was written, at one micro-batch."""
        return Recording(
            micro_batch=micro_batch,
            sizes=tuple(self.sizes),
            categories=tuple(self.categories),
            operators=tuple(self.operators),
            modules=tuple(self.modules),
            names=tuple(self.names),
            events=tuple(self.events),
            phases=tuple(self.phases),
        )
