"""A stream of births and deaths while it is simulated, the micro-steps of a trace in it, and one rank's optimizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from frugal.config.hardware.cluster import DeviceKind
from frugal.config.optimizers import EIGHT_BIT_BLOCK, SMALLEST_EIGHT_BIT, OptimizerImplementation, OptimizerName
from frugal.config.request import Request
from frugal.planning.memory.host_allocator import HostAllocator
from frugal.planning.memory.timeline import OPTIMIZER, TEMPORARY, MarkKind, ModelTrace, Timeline, TimelineBuilder
from frugal.planning.strategy import Strategy


class Stream:
    """Births, deaths and phases, in order. An empty storage has the number -1.

    `events`, `phase`, `empty_cache` and `timeline` are those of the `TimelineBuilder` that it writes.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._timeline = TimelineBuilder(names)
        self.events, self.phase = self._timeline.events, self._timeline.phase
        self.empty_cache, self.timeline = self._timeline.empty_cache, self._timeline.timeline
        self._held: dict[int, int] = {}  # storage -> how many hold it
        self._over: set[int] = set()  # held although everybody else is done with it

    def born(self, size_bytes: int, operator: str, category: int = TEMPORARY) -> int:
        """Begin a storage and return its number."""
        return self._timeline.born(size_bytes, category, operator) if size_bytes else -1

    def dies(self, *storages: int) -> None:
        """End storages, each as soon as nothing holds it."""
        for storage in storages:
            if self._held.get(storage):
                self._over.add(storage)
            elif storage >= 0:
                self.events.append(storage)

    def hold(self, storage: int) -> None:
        """Keep a storage beyond its death, until it is released as often as it is held."""
        self._held[storage] = self._held.get(storage, 0) + 1

    def release(self, storage: int) -> None:
        """Undo one `hold`."""
        self._held[storage] -= 1
        if not self._held[storage] and storage in self._over:
            self._over.discard(storage)
            self.dies(storage)

    def flash(self, size_bytes: int, operator: str, category: int = TEMPORARY) -> None:
        """Begin and end a storage at once."""
        self.dies(self.born(size_bytes, operator, category))

    def norm(self, elements: int, category: int = TEMPORARY) -> int:
        """Take a norm of a copy in fp64 (`get_norm_dtype` of zero/utils.py); return its storage."""
        copy = self.born(elements * 8, "aten._to_copy.default", category)
        norm = self.born(8, "aten.linalg_vector_norm.default", TEMPORARY)
        self.dies(copy)
        return norm

    def relabel(self, storage: int, category: int) -> None:
        """Change the category of a storage."""
        if storage >= 0:
            self._timeline.categories[storage] = category

    def add(self, stream: Timeline, sizes: Sequence[int] | None = None) -> int:
        """Add the storages of `stream`, whose names this one was made with; return the number of the first.

        `sizes`: their bytes, where they are not those of the micro-batch that is asked for: 0 is to be asked for then.
        """
        first = len(self._timeline.fixed)
        self._timeline.fixed += stream.fixed if sizes is None else sizes
        self._timeline.per_sample += stream.per_sample
        self._timeline.categories += stream.categories
        self._timeline.operators += stream.operators
        self._timeline.modules += stream.modules
        return first


class PinnedBlocks:
    """The host's memory. On a CPU the host is the device, and all of it belongs to the stream."""

    def __init__(self, stream: Stream, kind: DeviceKind) -> None:
        self._stream = stream
        self.is_device = kind == "cpu"
        self.allocator = HostAllocator()
        self._storages: list[tuple[int, bool]] = []  # bytes, and whether they are pinned

    def born(self, size_bytes: int, operator: str, category: int = TEMPORARY, *, pinned: bool = False) -> int:
        """Begin a storage and return its number."""
        if self.is_device:
            return self._stream.born(size_bytes, operator, category)
        self.allocator.allocate(size_bytes, pinned=pinned)
        self._storages.append((size_bytes, pinned))
        return len(self._storages) - 1

    def beside(self, size_bytes: int) -> int:
        """Begin a storage on the host of a device; -1 where the host is the device, which has it already."""
        return -1 if self.is_device else self.born(size_bytes, "aten.empty.memory_format")

    def dies(self, storage: int) -> None:
        """End a storage; -1: there is none."""
        if self.is_device:
            self._stream.dies(storage)
        elif storage >= 0:
            size_bytes, pinned = self._storages[storage]
            self.allocator.release(size_bytes, pinned=pinned)

    def pinned(self, storage: int, *, keep: bool = False) -> int:
        """Return a copy of a storage in pinned memory, in place of it unless it is kept; on a CPU itself."""
        if self.is_device:
            return storage
        copy = self.born(HostAllocator.pinned_bytes(self._storages[storage][0]), "pin memory", pinned=True)
        if not keep:
            self.dies(storage)
        return copy


SIMULATED: dict[OptimizerName, OptimizerImplementation | None] = {"adamw": "fused", "sgd": "fused", "adamw-8bit": None}
"""The optimizers that are simulated, with the kernels that take no memory besides their states."""


class Setting:
    """The part of one rank in training, read by the simulated optimizers.

    Attributes:
        strategy: the buckets and places of DeepSpeed's optimizer.
        elements: of every trainable parameter, in the model's order.
        all_elements: of every parameter.
        trainable: of every parameter, whether it is trained.
        element_bytes: of the model's type.
        item_bytes: of an element of every parameter; those of quantised weights are bytes.
        full_bytes: of every parameter.
        part_bytes: of one of the equal parts of every parameter.
        whole_bytes: of every parameter put together from equal parts.
        state_bytes: of a master weight, and of a state where it is not in blocks.
        offloads_optimizer: whether optimizer states live on the host.
        offloads_parameters: whether parameters live on the host, too, between uses.
        is_fp16: whether losses are scaled, so that gradients may be infinite.
    """

    def __init__(self, trace: ModelTrace, request: Request, strategy: Strategy, *, world_size: int, rank: int) -> None:
        self.strategy, self.world_size, self.rank = strategy, world_size, rank
        self.elements, self.all_elements, self.trainable = trace.trainable_elements, trace.elements, trace.trainable
        self.element_bytes, self.state_bytes = trace.element_bytes, request.optimizer.master_bytes_per_element
        whole = zip(trace.sizes_bytes, trace.elements, strict=True)
        self.item_bytes = tuple(size_bytes // max(1, n) for size_bytes, n in whole)
        sizes = list(zip(self.all_elements, self.item_bytes, strict=True))
        self.full_bytes = [n * item_bytes for n, item_bytes in sizes]
        self.part_bytes = [-(-n // world_size) * item_bytes for n, item_bytes in sizes]
        self.whole_bytes = [part_bytes * world_size for part_bytes in self.part_bytes]
        self.offloads_optimizer = strategy.offload_optimizer == "cpu"
        self.offloads_parameters = strategy.offload_parameters == "cpu"
        self._optimizer, self.is_fp16 = request.optimizer.name, request.precision == "fp16"

    def make_states(self, elements: int, place: Stream | PinnedBlocks) -> None:
        """Make the states of a tensor, as at the optimizer's first step.

        8-bit AdamW as in `frugal.deepspeed_adapter.simulate.fake_device.AdamW8bit`. Left out: its two maps of 1 KiB.
        """
        sizes = [elements * self.state_bytes] if self._optimizer != "sgd" else []
        if self._optimizer == "adamw-8bit" and elements >= SMALLEST_EIGHT_BIT:
            sizes = [elements, -(-elements // EIGHT_BIT_BLOCK) * 4]
        for size_bytes in [size_bytes for size_bytes in sizes for _ in range(2)]:  # both of each
            place.born(size_bytes, "aten.zeros_like.default", OPTIMIZER)


def pieces_of_a_norm(elements: int) -> list[int]:
    """Cut `elements` of gradients in fp32 into the pieces of which one norm each is taken, from a copy in fp64: of 32
    MiB, or an eighth of all, so that the copy of a small model takes no more than a quarter of its gradients."""
    most = min(1 << 22, -(-elements // 8))
    return [min(most, elements - start) for start in range(0, elements, most)]


def reduced_together(elements: Sequence[int], most: int) -> Iterator[range]:
    """Yield the positions of consecutive gradients that travel together: one that exceeds `most` elements ends them."""
    first = total = 0
    for last, number in enumerate(elements):
        total += number
        if total > most or last == len(elements) - 1:
            yield range(first, last + 1)
            first, total = last + 1, 0


class SimulatedOptimizer:
    """The ZeRO optimizer of one rank at work on a stream; each stage has its own rules.

    Attributes:
        is_boundary: whether the optimizer step comes after this backward.
        gathers: ZeRO-3, the all-gathers of the last micro-step and the elements they brought.
        at_marks: ZeRO-3, what handles each kind of mark, given its number and hold; other stages have all parameters at
            hand.
    """

    gathers: tuple[int, int] | None = None
    at_marks: Mapping[MarkKind, Callable[[int, int], None]] = {}

    def __init__(self, stream: Stream, host: PinnedBlocks, setting: Setting) -> None:
        self._stream, self._host, self._setting = stream, host, setting
        self.is_boundary = True
        self._bucket_parameters: list[int] = []
        self._bucket_elements = 0
        self._oversized: dict[int, int] = {}  # parameter larger than the bucket -> storage of its gradient
        self._norms: list[int] = []  # of own gradients that went to the host
        self._has_states = False

    def gradient(self, parameter: int, storage: int) -> None:
        """Handle the finished gradient of a trainable parameter; to keep it, hold `storage`."""
        raise NotImplementedError  # each stage has its own

    def end(self) -> None:
        """End a backward."""
        raise NotImplementedError  # each stage has its own

    def step(self) -> None:
        """Take the optimizer step."""
        raise NotImplementedError  # each stage has its own


class MicroStep:
    """A micro-step of a trace, played phase by phase into a stream."""

    def __init__(self, stream: Stream, trace: ModelTrace, sizes: Sequence[int] | None = None) -> None:
        """Begin one; `sizes`: the bytes of its storages, where it is not of the micro-batch that is asked for."""
        self._stream = stream
        self._first = stream.add(trace.stream, sizes)
        self._events = trace.stream.events_from(self._first)
        self._stops = trace.stops
        self._ranges = dict(trace.stream.phase_ranges)

    def play(self, phase: str, optimizer: SimulatedOptimizer) -> None:
        """Play all events of one of the trace's phases; `optimizer` handles the marks."""
        position, end = self._ranges[phase].start, self._ranges[phase].stop
        stream, events, at_marks = self._stream, self._events, optimizer.at_marks
        death, gradient = MarkKind.DEATH, MarkKind.GRADIENT  # looking up a member takes as long as the rest of the loop
        for event, kind, number, storage in self._stops[phase]:
            if event > position:
                stream.events += events[position:event]
                position = event
            if kind is death:
                stream.dies(storage + self._first)
                position += 1
            elif kind is gradient:
                optimizer.gradient(number, storage if storage < 0 else storage + self._first)
            elif kind in at_marks:
                at_marks[kind](number, storage)
        stream.events += events[position:end]
