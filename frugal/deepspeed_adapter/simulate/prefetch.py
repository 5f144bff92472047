"""ZeRO-3's coordinator, which decides when parameters are gathered and how long they stay.

Names in brackets are methods of `PartitionedParameterCoordinator` in
deepspeed/runtime/zero/partitioned_param_coordinator.py. The first forward and backward are recorded; from the second on
the coordinator knows the order of modules, gathers ahead of their use and keeps what is used again soon. Its own
decisions are made here, module by module.
"""

from collections import defaultdict, deque
from collections.abc import Collection

from frugal.deepspeed_adapter.simulate.stream import Setting, Stream
from frugal.planning.memory.timeline import COMMUNICATION, ModelTrace

SPLIT, IN_FLIGHT, GATHERED = range(3)
NEVER = -(10**10)


class _Gather:
    """One all-gather: of several parameters into one buffer for each size of element, which are copied apart when the
    first is needed."""

    def __init__(self, parameters: list[int], buffers: list[int]) -> None:
        self.parameters = parameters
        self.buffers = buffers
        self.is_complete = False
        self.waiting = len(parameters)


class SimulatedPrefetch:
    """The coordinator of one rank."""

    def __init__(self, stream: Stream, setting: Setting, trace: ModelTrace) -> None:
        self._stream = stream
        self._setting = setting
        self._trace = trace
        self._own = list(trace.gathered)
        self._seen = list(trace.own_parameters), list(trace.parameters_within)  # with those of others that it reads
        self._running: list[int] = []  # modules in forward, the innermost last
        elements = setting.all_elements
        self._elements = elements
        self._full_bytes = [n * item_bytes for n, item_bytes in zip(elements, setting.item_bytes, strict=True)]
        self._whole_bytes = [setting.whole_bytes(parameter) for parameter in range(len(elements))]
        self._is_persistent = [n <= setting.strategy.persistence_threshold_elements for n in elements]
        self._status = [SPLIT] * len(elements)
        self._storage = [-1] * len(elements)
        self._active: list[set[int]] = [set() for _ in elements]  # modules that use the parameter now
        self._in_flight: dict[int, _Gather] = {}
        self._available = 0  # elements
        self._runs = 0  # forwards so far
        self._step = 0
        self._order: list[int] = []  # modules as they fetch, forward and backward
        self._steps_of: dict[int, deque[int]] = defaultdict(deque)
        self._uses: list[tuple[int, int]] = []  # (parameter, step that uses it)
        self._queue: deque[tuple[int, int]] = deque()
        self._fetched_for: dict[int, int] = {}
        self._kept: dict[tuple[int, int], frozenset[int]] = {}
        self._in_backward: dict[int, None] = {}
        self._recomputed: dict[int, set[int]] = defaultdict(set)  # module -> frozen parameters kept for its backward
        self.num_gathers = self.gathered_elements = 0  # since the last forward began

    @property
    def _is_known(self) -> bool:
        return self._runs > 1

    def storage(self, parameter: int) -> int:
        """Return the storage of a gathered parameter; -1: it is not gathered."""
        return self._storage[parameter]

    def forward_begins(self) -> None:
        """Begin a forward of the whole model (`reset_step`, `construct_parameter_trace_from_module_trace`)."""
        self._land_everything()
        self.num_gathers = self.gathered_elements = 0
        self._runs += 1
        if self._runs == 2:
            for module in self._order:
                step = self._steps_of[module].popleft()
                self._uses += [(parameter, step) for parameter in self._own[module]]
        self._queue = deque(self._uses)
        self._fetched_for = {}
        self._step = 0
        self._available = 0

    def fetch(self, module: int, *, in_backward: bool) -> None:
        """Gather what a module needs before it runs (`fetch_sub_module`)."""
        if self._runs == 1:
            self._order.append(module)
            self._steps_of[module].append(self._step)
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
                if is_repeated and not self._setting.trainable[parameter]:
                    self._keep_for_backward(parameter)
                if parameter in self._in_flight:
                    self._land(parameter)
        if self._queue:
            self._prefetch(own)
        self._step += 1

    def read(self, parameter: int) -> None:
        """Gather a parameter by itself that is looked at while it is split; the module that runs gathers it from then
        on (`ZeROOrderedDict.__getitem__`)."""
        if self._status[parameter] == SPLIT:
            module = self._running[-1]
            for of_modules in (self._own, *filter(None, self._seen)):
                of_modules[module] = tuple(sorted({*of_modules[module], parameter}))
            self._gather([parameter])
            self._land(parameter)
            self._available -= self._elements[parameter]  # the coordinator does not count it

    def release(self, module: int, *, in_backward: bool) -> None:
        """Release what a module no longer needs after it ran (`release_sub_module`)."""
        own = self._own[module]
        going: Collection[int] = own
        if own and self._is_known:
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

    def _keep_for_backward(self, parameter: int) -> None:
        """Keep a frozen parameter fetched to recompute until the backward of the module that asked for it ends.

        (`update_recompute_parameters`)
        """
        owner = next(reversed(self._in_backward))
        self._recomputed[owner].add(parameter)
        self._active[parameter].add(owner)

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
                (self._storage[parameter],) = self._buffers([parameter])
            for copy in copies:
                self._stream.dies(copy)
        for parameter in persistent:
            self._status[parameter] = GATHERED

    def _buffers(self, parameters: list[int]) -> list[int]:
        if len(parameters) == 1:
            return [self._stream.born(self._whole_bytes[parameters[0]], "aten.empty.memory_format", COMMUNICATION)]
        sizes: dict[int, int] = {}
        for parameter in parameters:
            item_bytes = self._setting.item_bytes[parameter]
            sizes[item_bytes] = sizes.get(item_bytes, 0) + self._whole_bytes[parameter]
        return [
            self._stream.born(size_bytes, "aten.empty.memory_format", COMMUNICATION)
            for _, size_bytes in sorted(sizes.items(), reverse=True)
        ]

    def _copies(self, parameters: list[int]) -> list[int]:
        """Copy own parts from the host, to be gathered."""
        if not self._setting.offloads_parameters:
            return []
        parts = [self._setting.part_bytes(parameter) for parameter in parameters]
        return [self._stream.born(part_bytes, "aten._to_copy.default", COMMUNICATION) for part_bytes in parts]

    def _take_whole(self, parameters: list[int]) -> None:
        """Take the part as the whole, or its copy from the host: on one rank nothing is gathered."""
        for parameter, copy in zip(parameters, self._copies(parameters), strict=False):
            self._storage[parameter] = copy

    def _gather(self, parameters: list[int]) -> None:
        """Gather split parameters together (`__all_gather_params_`)."""
        self.num_gathers += 1
        gathered_bytes = 0
        for parameter in parameters:
            gathered_bytes += self._full_bytes[parameter]
            self._available += self._elements[parameter]
        self.gathered_elements += gathered_bytes // self._setting.element_bytes
        buffers: list[int] = []
        if self._setting.world_size == 1:
            self._take_whole(parameters)
        else:
            buffers = self._buffers(parameters)
            for copy in self._copies(parameters):  # all are there before the first goes
                self._stream.dies(copy)
        gather = _Gather(sorted(parameters), buffers)
        for parameter in parameters:
            self._status[parameter] = IN_FLIGHT
            self._in_flight[parameter] = gather
        if len(parameters) == 1 and buffers:
            (self._storage[parameters[0]],) = buffers  # used as it is

    def _land(self, parameter: int) -> None:
        """Wait for the gather of a parameter; the others in it come along (`AllGatherCoalescedHandle.wait`)."""
        gather = self._in_flight.pop(parameter)
        together = len(gather.parameters) > 1 and self._setting.world_size > 1
        if not gather.is_complete:
            gather.is_complete = True
            for each in gather.parameters:
                self._status[each] = GATHERED
                if together:
                    self._storage[each] = self._stream.born(self._full_bytes[each], "aten.cat.default", COMMUNICATION)
        gather.waiting -= 1
        if together and gather.waiting == 0:
            for buffer in gather.buffers:
                self._stream.dies(buffer)

    def _land_everything(self) -> None:
        for parameter in list(self._in_flight):
            self._land(parameter)
            self._drop(parameter)

    def _drop(self, parameter: int) -> None:
        if self._status[parameter] == GATHERED and not self._active[parameter]:
            self._stream.dies(self._storage[parameter])
            self._storage[parameter] = -1
            self._status[parameter] = SPLIT
            self._available -= self._elements[parameter]

    def _prefetch(self, own: tuple[int, ...]) -> None:
        """Gather what comes next (`_fetch_sub_module_impl`)."""
        fetched_for, queue = self._fetched_for, self._queue
        if own:
            expected = 0
            for parameter in own:
                if fetched_for.get(parameter, NEVER) < self._step:
                    expected += 1
            passed: set[int] = set()
            while queue and len(passed) < expected:
                parameter, step = queue.popleft()
                fetched_for[parameter] = step
                passed.add(parameter)
        most = min(
            self._setting.strategy.max_live_elements - self._available, self._setting.strategy.prefetch_bucket_elements
        )
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
            is_one = module in self._trace.gathered_as_one
            seen = self._seen[is_one]
            for step in range(self._step, len(self._order)):
                if passed >= self._setting.strategy.max_live_elements or not going:
                    break
                for parameter in seen[self._order[step]]:
                    going.discard(parameter)
                    passed += self._elements[parameter]
            self._kept[key] = frozenset(going)
        return self._kept[key]
