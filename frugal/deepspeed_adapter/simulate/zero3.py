"""ZeRO-3: every parameter is cut into equal parts by itself, gathered before its use and released after it.

Names in brackets are methods of `DeepSpeedZeroOptimizer_Stage3` in deepspeed/runtime/zero/stage3.py. When parameters
are gathered, and how long they stay, is decided by ZeRO-3's coordinator, `PartitionedParameterCoordinator` in
deepspeed/runtime/zero/partitioned_param_coordinator.py; its methods are named at `SimulatedPrefetch`.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from frugal.deepspeed_adapter.simulate.stream import PinnedBlocks, Setting, SimulatedOptimizer, Stream
from frugal.planning.memory.timeline import (
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARY,
    MarkKind,
    ModelTrace,
)
from frugal.planning.strategy import num_groups_on_device, sub_groups

SPLIT, IN_FLIGHT, GATHERED = range(3)
NEVER = -(10**10)


@dataclass
class _Gather:
    """One all-gather: of several parameters into one buffer for each size of element, which are copied apart when the
    first is needed."""

    parameters: list[int]
    buffers: list[int]
    waiting: int
    is_complete: bool = False


class SimulatedPrefetch:
    """The coordinator of one rank."""

    def __init__(self, stream: Stream, setting: Setting, trace: ModelTrace) -> None:
        self._stream = stream
        self._setting = setting
        self._limits = setting.strategy
        self._gathered_as_one = trace.gathered_as_one
        self._own = list(trace.gathered)
        self._seen = list(trace.own_parameters), list(trace.parameters_within)  # with those of others that it reads
        self._running: list[int] = []  # modules in forward, the innermost last
        self._elements = elements = setting.all_elements
        self._is_persistent = [n <= setting.strategy.persistence_threshold_elements for n in elements]
        self._status = [SPLIT] * len(elements)
        self.storage = [-1] * len(elements)  # of each gathered parameter; -1: it is not gathered
        self._active: list[set[int]] = [set() for _ in elements]  # modules that use the parameter now
        self._in_flight: dict[int, _Gather] = {}
        self._available = 0  # elements
        self._runs = 0  # forwards so far
        self._step = 0
        self._order = trace.fetches  # of modules, forward and backward, which the first forward and backward tell
        self._uses: list[tuple[int, int]] = []  # (parameter, step that uses it)
        self._queue: deque[tuple[int, int]] = deque()
        self._fetched_for: dict[int, int] = {}
        self._kept: dict[tuple[int, int], frozenset[int]] = {}
        self._in_backward: dict[int, None] = {}
        self._recomputed: dict[int, set[int]] = defaultdict(set)  # module -> frozen parameters kept for its backward
        self.num_gathers = self.gathered_elements = 0  # since the last forward began

    def forward_begins(self, *_: int) -> None:
        """Begin a forward of the whole model (`reset_step`, `construct_parameter_trace_from_module_trace`)."""
        for parameter in list(self._in_flight):
            self._land(parameter)
            self._drop(parameter)
        self.num_gathers = self.gathered_elements = 0
        self._runs += 1
        if self._runs == 2:
            for step, module in enumerate(self._order):
                self._uses += [(parameter, step) for parameter in self._own[module]]
        self._queue = deque(self._uses)
        self._fetched_for = {}
        self._step = 0
        self._available = 0

    def fetch(self, module: int, _hold: int = -1, *, in_backward: bool = False) -> None:
        """Gather what a module needs before it runs (`fetch_sub_module`)."""
        if in_backward:
            self._in_backward[module] = None
        else:
            self._running.append(module)
        own = self._own[module]
        if own:
            if split := [parameter for parameter in own if self._status[parameter] == SPLIT]:
                self._gather(split)
            is_repeated = bool(self._in_backward) and not in_backward
            for parameter in own:
                self._active[parameter].add(module)
                if is_repeated and not self._setting.trainable[parameter]:  # `update_recompute_parameters`
                    owner = next(reversed(self._in_backward))
                    self._recomputed[owner].add(parameter)
                    self._active[parameter].add(owner)
                if parameter in self._in_flight:
                    self._land(parameter)
        if self._queue:
            self._prefetch(own)
        self._step += 1

    def read(self, parameter: int, _hold: int = -1) -> None:
        """Gather a parameter by itself that is looked at while it is split; the module that runs gathers it from then
        on (`ZeROOrderedDict.__getitem__`). The coordinator counts none of it."""
        if self._status[parameter] == SPLIT:
            for of_modules in (self._own, *filter(None, self._seen)):
                of_modules[self._running[-1]] = tuple(sorted({*of_modules[self._running[-1]], parameter}))
            (self.storage[parameter],) = self._buffers([parameter])  # on one rank, too
            self._stream.dies(*self._copies([parameter]))
            self._status[parameter] = GATHERED

    def release(self, module: int, _hold: int = -1, *, in_backward: bool = False) -> None:
        """Release what a module no longer needs after it ran (`release_sub_module`)."""
        own = self._own[module]
        going: Collection[int] = own
        if own and self._runs > 1:
            going = self._to_release(module)
        if not in_backward:
            self._running.pop()
        else:
            self._in_backward.pop(module, None)
            if recomputed := self._recomputed.pop(module, None):
                own = (*own, *recomputed)
                going = {*going, *(parameter for parameter in recomputed if not self._is_persistent[parameter])}
        for parameter in own:
            self._active[parameter].discard(module)
            if parameter in going:
                self._drop(parameter)

    def backward_ends(self) -> None:
        """Release modules whose backward has not announced its end (`release_backward_leftovers`)."""
        while self._in_backward:
            module, _ = self._in_backward.popitem()
            for parameter in (*self._own[module], *self._recomputed.pop(module, ())):
                self._active[parameter].discard(module)
                if not self._is_persistent[parameter]:
                    self._drop(parameter)

    def split_all(self) -> None:
        """Release everything before the optimizer step (`release_and_reset_all`)."""
        for parameter in range(len(self._status)):
            if parameter in self._in_flight:
                self._land(parameter)
            self._active[parameter].clear()
            self._drop(parameter)

    def gather_persistent(self) -> None:
        """Gather persistent parameters after the optimizer step, each into a buffer of its own.

        (`DeepSpeedZeroOptimizer_Stage3._post_step`)
        """
        persistent = [parameter for parameter, stays in enumerate(self._is_persistent) if stays]
        if self._setting.world_size == 1:
            self._take_whole(persistent)
        else:
            copies = self._copies(persistent)
            for parameter in persistent:
                (self.storage[parameter],) = self._buffers([parameter])
            self._stream.dies(*copies)
        for parameter in persistent:
            self._status[parameter] = GATHERED

    def _buffers(self, parameters: list[int]) -> list[int]:
        """Make what parameters are gathered into together: a buffer for each size of element."""
        sizes: dict[int, int] = {}
        item_bytes, whole_bytes = self._setting.item_bytes, self._setting.whole_bytes
        for parameter in parameters:
            sizes[item_bytes[parameter]] = sizes.get(item_bytes[parameter], 0) + whole_bytes[parameter]
        return [
            self._stream.born(size_bytes, "aten.empty.memory_format", COMMUNICATION)
            for _, size_bytes in sorted(sizes.items(), reverse=True)
        ]

    def _copies(self, parameters: list[int]) -> list[int]:
        """Copy own parts from the host, to be gathered."""
        if not self._setting.offloads_parameters:
            return []
        return [
            self._stream.born(self._setting.part_bytes[parameter], "aten._to_copy.default", COMMUNICATION)
            for parameter in parameters
        ]

    def _take_whole(self, parameters: list[int]) -> None:
        """Take the part as the whole, or its copy from the host: on one rank nothing is gathered."""
        for parameter, copy in zip(parameters, self._copies(parameters), strict=False):
            self.storage[parameter] = copy

    def _gather(self, parameters: list[int]) -> None:
        """Gather split parameters together (`__all_gather_params_`)."""
        self.num_gathers += 1
        gathered_bytes = sum(map(self._setting.full_bytes.__getitem__, parameters))
        self.gathered_elements += gathered_bytes // self._setting.element_bytes
        self._available += sum(map(self._elements.__getitem__, parameters))
        buffers: list[int] = []
        if self._setting.world_size == 1:
            self._take_whole(parameters)
        else:
            buffers = self._buffers(parameters)
            self._stream.dies(*self._copies(parameters))  # all are there before the first goes
        gather = _Gather(sorted(parameters), buffers, len(parameters))
        for parameter in parameters:
            self._status[parameter] = IN_FLIGHT
            self._in_flight[parameter] = gather
        if len(parameters) == 1 and buffers:
            (self.storage[parameters[0]],) = buffers  # used as it is

    def _land(self, parameter: int) -> None:
        """Wait for the gather of a parameter; the others in it come along (`AllGatherCoalescedHandle.wait`)."""
        gather = self._in_flight.pop(parameter)
        together = len(gather.parameters) > 1 and self._setting.world_size > 1
        if not gather.is_complete:
            gather.is_complete = True
            for each in gather.parameters:
                self._status[each] = GATHERED
                if together:
                    self.storage[each] = self._stream.born(
                        self._setting.full_bytes[each], "aten.cat.default", COMMUNICATION
                    )
        gather.waiting -= 1
        if together and gather.waiting == 0:
            self._stream.dies(*gather.buffers)

    def _drop(self, parameter: int) -> None:
        if self._status[parameter] == GATHERED and not self._active[parameter]:
            self._stream.dies(self.storage[parameter])
            self.storage[parameter] = -1
            self._status[parameter] = SPLIT
            self._available -= self._elements[parameter]

    def _prefetch(self, own: tuple[int, ...]) -> None:
        """Gather what comes next (`_fetch_sub_module_impl`)."""
        fetched_for, queue = self._fetched_for, self._queue
        if own:
            expected = sum(fetched_for.get(parameter, NEVER) < self._step for parameter in own)
            passed: set[int] = set()
            while queue and len(passed) < expected:
                parameter, step = queue.popleft()
                fetched_for[parameter] = step
                passed.add(parameter)
        most = min(self._limits.max_live_elements - self._available, self._limits.prefetch_bucket_elements)
        wanted: dict[int, None] = {}
        elements = 0
        while queue and elements < most:
            parameter, step = queue.popleft()
            fetched_for[parameter] = max(fetched_for.get(parameter, NEVER), step)
            if self._status[parameter] == SPLIT and parameter not in wanted:
                wanted[parameter] = None
                elements += self._elements[parameter]
        if wanted:
            self._gather(list(wanted))

    def _to_release(self, module: int) -> frozenset[int]:
        """Return a module's parameters that are not used again soon; DeepSpeed decides once a step.

        (`__params_to_release`)
        """
        key = (module, self._step)
        if key not in self._kept:
            going = {
                parameter
                for parameter in self._own[module]
                if not self._is_persistent[parameter] and self._fetched_for.get(parameter, NEVER) <= self._step
            }
            passed = 0
            # DeepSpeed asks of every module that comes what this one gathers: what it owns, or all within
            seen = self._seen[module in self._gathered_as_one]
            for step in range(self._step, len(self._order)):
                if passed >= self._limits.max_live_elements or not going:
                    break
                for parameter in seen[self._order[step]]:
                    going.discard(parameter)
                    passed += self._elements[parameter]
            self._kept[key] = frozenset(going)
        return self._kept[key]


class SimulatedZero3(SimulatedOptimizer):
    """The ZeRO-3 optimizer of one rank."""

    def __init__(self, stream: Stream, host: PinnedBlocks, setting: Setting, trace: ModelTrace) -> None:
        super().__init__(stream, host, setting)
        self._micro_step = 0
        self._gathering = gathering = SimulatedPrefetch(stream, setting, trace)
        self._parts = [-(-n // setting.world_size) for n in setting.elements]
        self._groups = sub_groups(self._parts, setting.strategy.sub_group_elements)
        sums = list(accumulate(self._parts))
        ends = [0, *(bisect_left(sums, end) + 1 for end in accumulate(self._groups))]
        self._group_lengths = [end - begin for begin, end in pairwise(ends)]  # in parameters
        on_device = num_groups_on_device(len(self._groups), setting.strategy.offload_ratio)
        self._places = [stream if number < on_device else host for number in range(len(self._groups))]  # if offloaded
        self._held: dict[int, deque[int]] = defaultdict(deque)  # number of a hold -> storages of gathered parameters
        self.at_marks = {
            MarkKind.FORWARD_BEGINS: gathering.forward_begins,
            MarkKind.FETCH: gathering.fetch,
            MarkKind.RELEASE: gathering.release,
            MarkKind.FETCH_IN_BACKWARD: partial(gathering.fetch, in_backward=True),
            MarkKind.RELEASE_IN_BACKWARD: partial(gathering.release, in_backward=True),
            MarkKind.HOLD: self._hold,
            # of the earlier micro-step, whose graph may end after forward
            MarkKind.LET_GO: lambda _parameter, hold: self._stream.release(self._held[hold].popleft()),
            MarkKind.READ: gathering.read,
        }

    def initialise(self, *, one_by_one: bool) -> None:
        """Split parameters as they arrive, `one_by_one` or all at once, and move the parts of trained ones together.

        (`_setup_for_real_optimizer`, `_create_fp16_partitions_with_defragmentation`)
        """
        stream, setting = self._stream, self._setting
        size = setting.element_bytes
        parts = []
        sizes = setting.full_bytes
        there = [] if one_by_one else [stream.born(size_bytes, "building", PARAMETERS) for size_bytes in sizes]
        for i, (size_bytes, is_trained) in enumerate(zip(sizes, setting.trainable, strict=True)):
            whole = stream.born(size_bytes, "to device", PARAMETERS) if one_by_one else there[i]
            if setting.offloads_parameters:
                part = self._host.pinned(self._host.born(setting.part_bytes[i], "aten.empty.memory_format", PARAMETERS))
            else:
                category = TEMPORARY if is_trained else PARAMETERS
                part = stream.born(setting.part_bytes[i], "aten.empty.memory_format", category)
            if is_trained:
                parts.append(part)  # those of frozen parameters stay as they are
            stream.dies(whole)
        if setting.offloads_parameters:
            self._host.pinned(self._host.born(sum(self._parts) * size, "aten.empty.memory_format", PARAMETERS))
            for part in parts:
                self._host.dies(part)
        else:  # by way of the host (`defragment` of zero/utils.py)
            through_host = self._host.beside(sum(self._parts) * size)
            stream.dies(*parts)
            self._host.dies(through_host)
            stream.empty_cache()
            stream.born(sum(self._parts) * size, "aten._to_copy.default", PARAMETERS)
        if setting.offloads_optimizer:
            self._initialise_on_host()
        else:
            for group in self._groups:
                converted = stream.born(group * 4, "aten._to_copy.default") if size < setting.state_bytes else -1
                stream.born(group * setting.state_bytes, "aten.clone.default", OPTIMIZER)
                stream.dies(converted)
            stream.flash(max(self._groups) * setting.state_bytes, "aten.zeros.default")
        stream.born(setting.strategy.reduce_bucket_elements * size, "aten.empty.memory_format", COMMUNICATION)
        if setting.offloads_optimizer:
            self._host.pinned(self._host.born(sum(self._parts) * 4, "aten.zeros.default", GRADIENTS))
        else:
            stream.born(sum(self._parts) * 4, "aten.zeros.default", GRADIENTS)
        whole = stream.born(max(self._parts) * setting.world_size * size, "aten.empty.memory_format")
        if setting.offloads_parameters:
            stream.flash(max(self._parts) * size, "aten._to_copy.default")
        stream.dies(whole)

    def _initialise_on_host(self) -> None:
        """Make master weights and their gradients (`_create_fp32_partitions`, `initialize_optimizer_states`).

        Parameters that are there in the masters' type already are only copied once. The gradients of groups that are
        updated on the device are made on the host, too, and copied.
        """
        host, stream, state_bytes = self._host, self._stream, self._setting.state_bytes
        is_same_type = state_bytes == self._setting.element_bytes
        parameters_are: Stream | PinnedBlocks = host if self._setting.offloads_parameters else stream
        converted, converted_in = -1, parameters_are
        for group, place in zip(self._groups, self._places, strict=True):
            is_there = is_same_type and place is parameters_are
            following = -1 if is_there else place.born(group * state_bytes, "aten._to_copy.default")
            converted_in.dies(converted)
            converted, converted_in = following, place
            place.born(group * state_bytes, "aten.clone.default", OPTIMIZER)
        converted_in.dies(converted)
        shared = host.born(max(self._groups) * state_bytes, "aten.zeros.default")
        copied = -1
        for group, place in zip(self._groups, self._places, strict=True):
            gradient = host.born(group * state_bytes, "aten.zeros.default", GRADIENTS)
            host.dies(copied)
            gradient, copied = host.pinned(gradient), -1
            if place is stream:
                stream.born(group * state_bytes, "aten._to_copy.default", GRADIENTS)
                copied = gradient
        host.dies(shared)

    def _hold(self, parameter: int, hold: int) -> None:
        self._held[hold].append(self._gathering.storage[parameter])
        self._stream.hold(self._held[hold][-1])

    def gradient(self, parameter: int, storage: int) -> None:
        """Handle a gradient (`reduce_independent_p_g_buckets_and_remove_grads`, `__add_grad_to_ipg_bucket`)."""
        n = self._setting.elements[parameter]
        if self._bucket_elements and self._bucket_elements + n > self._setting.strategy.reduce_bucket_elements:
            self._flush()
        if n > self._setting.strategy.reduce_bucket_elements:
            self._stream.hold(storage)
            self._oversized[parameter] = storage
        self._bucket_elements += n
        self._bucket_parameters.append(parameter)

    def end(self) -> None:
        """End backward (`independent_gradient_partition_epilogue`)."""
        self._flush()
        self._gathering.backward_ends()
        self.gathers = self._gathering.num_gathers, self._gathering.gathered_elements
        self._micro_step += 1

    def step(self) -> None:
        """Take the optimizer step, one group of parts after the other (`step`)."""
        stream, setting = self._stream, self._setting
        self._gathering.split_all()
        self._micro_step = 0
        if setting.is_fp16:  # infinities are looked for (`has_overflow`): on a GPU in a copy of absolute values
            number, on_host = sum(self._parts), setting.offloads_optimizer or self._host.is_device
            values = -1 if on_host else stream.born(number * 4, "aten.isinf.default")
            place = self._host if on_host else stream
            place.dies(place.born(number, "aten.isinf.default"))
            stream.dies(values)
        if setting.offloads_optimizer:
            for group, place in zip(self._groups, self._places, strict=True):
                if not self._has_states:
                    setting.make_states(group, place)
            stream.dies(*self._norms)
            self._norms.clear()
        else:
            stream.dies(*[stream.norm(part) for part in self._parts])
            for group, num_parameters in zip(self._groups, self._group_lengths, strict=True):
                gradient = stream.born(group * 4, "aten.cat.default") if num_parameters > 1 else -1
                if setting.state_bytes < 4:
                    rounded = stream.born(group * setting.state_bytes, "aten._to_copy.default")
                    stream.dies(gradient)
                    gradient = rounded
                if not self._has_states:
                    setting.make_states(group, stream)
                stream.dies(gradient)
        self._has_states = True
        self._gathering.gather_persistent()

    def _flush(self) -> None:
        """Reduce-scatter what is in the bucket; own parts are copied or added to the gradient buffer.

        (`__reduce_and_partition_ipg_grads`)
        """
        if not self._bucket_parameters:
            return
        stream, setting = self._stream, self._setting
        size = setting.element_bytes
        elements = [setting.elements[parameter] for parameter in sorted(self._bucket_parameters)]
        parts = [-(-n // setting.world_size) for n in elements]
        together = -1
        if len(elements) > 1 or elements[0] % setting.world_size:
            padded_bytes = sum(parts) * setting.world_size * size
            together = stream.born(padded_bytes, "aten.new_empty.default", COMMUNICATION)
        # The last ranks may have less than a part.
        parts = [max(0, min(part, n - part * setting.rank)) for n, part in zip(elements, parts, strict=True)]
        copies = []
        if size < 4:
            copies = [stream.born(own * 4, "aten._to_copy.default", COMMUNICATION) for own in parts]
            stream.dies(together)
        if setting.offloads_optimizer:
            self._to_host([own for own in parts if own])
        for parameter in self._bucket_parameters:
            if parameter in self._oversized:
                stream.release(self._oversized.pop(parameter))
        stream.dies(*copies)
        if size == 4:
            stream.dies(together)
        self._bucket_parameters.clear()
        self._bucket_elements = 0

    def _to_host(self, parts: list[int]) -> None:
        """Sum gradients on the device and keep them on the host (`partition_grads`).

        The first micro-step only copies.
        """
        stream = self._stream
        previous = -1
        for own in parts:
            if self._micro_step == 0:
                stream.dies(previous)
            copy = stream.born(own * 4, "aten._to_copy.default", COMMUNICATION)
            if self._micro_step > 0:
                stream.dies(previous)
            previous = copy
            if self.is_boundary:
                self._norms.append(stream.norm(own, COMMUNICATION))
                if self._setting.state_bytes < 4:
                    stream.flash(own * self._setting.state_bytes, "aten._to_copy.default", COMMUNICATION)
        stream.dies(previous)
