"""CUDA streams that DeepSpeed works on beside the one that computes, and how long they hold what it frees there.

What is made there, or freed there, is freed before that work is done, and the allocator keeps it until then
(`record_stream` in stage_1_and_2.py:1531 and 2430, stage3.py:1639, partition_parameters.py:327). The computing
stream waits for the work before (stage_1_and_2.py:1608), so one piece of it is under way, and the host, which runs
ahead, may not have seen the end of one more: what was freed lives until the second next begins. ZeRO-3 lets it run no
further ahead (`max_param_reduce_events`, stage3.py:1666). A piece of work makes something: a reduced bucket, a
gathered parameter. Copies into a bucket belong to the next one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

WORKS_IN_FLIGHT = 2
"""How many pieces of work on a side stream may be unfinished when the host frees what they used."""


class SideStreams:
    """What work is under way on them. Storages go by their address while they live, and by their index."""

    def __init__(self) -> None:
        self._working = ""  # the stream that works now
        self._is_idle = True  # nothing was made yet in the block that works now
        self._works: dict[str, int] = {}  # stream -> pieces of work begun
        self._made_on: dict[int, str] = {}  # address of a live storage -> the stream it was made on
        self._unfinished: dict[str, list[tuple[int, int]]] = {}  # stream -> (work when it was freed, storage's index)

    @contextmanager
    def at_work(self, name: str) -> Iterator[None]:
        """Inside the `with` block DeepSpeed works on the stream `name`."""
        before = self._working, self._is_idle
        self._working, self._is_idle = name, True
        self._works.setdefault(name, 0)
        self._unfinished.setdefault(name, [])
        try:
            yield
        finally:
            self._working, self._is_idle = before

    def born(self, address: int) -> list[int]:
        """A storage begins; the indices of those that are free at last because a piece of work begins with it."""
        stream = self._working
        if not stream:
            return []
        self._made_on[address] = stream
        if not self._is_idle:
            return []
        self._is_idle = False
        self._works[stream] += 1
        return self._finish(stream, self._works[stream] - WORKS_IN_FLIGHT)

    def keeps(self, address: int, index: int) -> bool:
        """Whether a storage that ends now is kept until work on a side stream is done."""
        stream = self._made_on.pop(address, self._working)
        if not stream:
            return False
        self._unfinished[stream].append((self._works[stream], index))
        return True

    def join(self) -> list[int]:
        """All streams are waited for; the indices of the storages that are free then."""
        return [index for stream, works in self._works.items() for index in self._finish(stream, works)]

    def _finish(self, stream: str, work: int) -> list[int]:
        """All of a stream's work up to number `work` is done, so what it held is free."""
        held = self._unfinished[stream]
        self._unfinished[stream] = [(number, index) for number, index in held if number > work]
        return [index for number, index in held if number <= work]
