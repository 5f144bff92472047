"""The host's memory: tensors in it, with the blocks of pinned memory that torch keeps."""

from collections import Counter


class HostAllocator:
    """The bytes of tensors in a host's memory: now, and the most so far.

    Pinned memory comes in blocks, and a block that is freed is kept for the next one of its size
    (`CachingHostAllocatorImpl` in ATen/core/CachingHostAllocator.h).
    """

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self._free_pinned: Counter[int] = Counter()  # bytes of a pinned block -> how many are kept

    @staticmethod
    def pinned_bytes(size_bytes: int) -> int:
        """Return the bytes of the block for a pinned tensor: a power of two."""
        return 1 << (size_bytes - 1).bit_length()

    def allocate(self, size_bytes: int, *, pinned: bool = False) -> None:
        """Begin a tensor, or the pinned block for one."""
        if pinned and self._free_pinned[size_bytes]:
            self._free_pinned[size_bytes] -= 1  # it is counted already
        else:
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, size_bytes: int, *, pinned: bool = False) -> None:
        """End a tensor or a pinned block."""
        if pinned:
            self._free_pinned[size_bytes] += 1
        else:
            self.live_bytes -= size_bytes
