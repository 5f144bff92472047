"""The host's memory in a rehearsal on a pretended GPU, counted while it is used."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class HostMemory:
    """Bytes of the storages that live on the host, and the most that did at once."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self._storages: set[int] = set()  # addresses of the live ones
        self._waiting: dict[int, int] = {}  # address -> bytes of the model's storages that go to the device
        self._is_pinning = False
        self._pinned: set[int] = set()  # addresses of live pinned storages
        self._free_pinned: Counter[int] = Counter()  # bytes of a pinned block -> how many are kept for reuse

    @contextmanager
    def pinning(self) -> Iterator[None]:
        """What is made on the host inside the `with` block is pinned.

        torch keeps a pinned block that is freed, for the next one of its size (CachingHostAllocator.h:358).
        """
        self._is_pinning = True
        try:
            yield
        finally:
            self._is_pinning = False

    def born(self, address: int, size_bytes: int, *, is_waiting: bool = False) -> None:
        """A storage begins. `is_waiting`: the model's, which goes to the device later."""
        if is_waiting:
            self._waiting[address] = size_bytes
        else:
            self._storages.add(address)
        if self._is_pinning:
            self._pinned.add(address)
            if self._free_pinned[size_bytes]:
                self._free_pinned[size_bytes] -= 1
                return
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def leave(self, address: int) -> int | None:
        """A storage goes to the device: its bytes; None if it does not wait for that."""
        size_bytes = self._waiting.pop(address, None)
        if size_bytes is not None:
            self.live_bytes -= size_bytes
        return size_bytes

    def died(self, address: int, size_bytes: int) -> None:
        """A storage ends, if it lives here."""
        if address not in self._storages:
            self.leave(address)
            return
        self._storages.discard(address)
        if address in self._pinned:
            self._pinned.discard(address)
            self._free_pinned[size_bytes] += 1
        else:
            self.live_bytes -= size_bytes
