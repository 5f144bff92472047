"""ZeRO-3: every parameter is cut into equal parts by itself, gathered before its use and released after it.

Names in brackets are methods of `DeepSpeedZeroOptimizer_Stage3` in deepspeed/runtime/zero/stage3.py. `prefetch` decides
when parameters are gathered.
"""

from collections import defaultdict, deque
from collections.abc import Callable

from frugal.deepspeed_adapter.simulate.prefetch import SimulatedPrefetch
from frugal.deepspeed_adapter.simulate.stream import PinnedBlocks, Setting, Stream
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


class SimulatedZero3:
    """The ZeRO-3 optimizer of one rank."""

    def __init__(self, stream: Stream, host: PinnedBlocks, setting: Setting, trace: ModelTrace) -> None:
        self._stream = stream
        self._host = host
        self._micro_step = 0
        self._is_boundary = True
        self._setting = setting
        self._gathering = SimulatedPrefetch(stream, setting, trace)
        self._parts = [-(-n // setting.world_size) for n in setting.elements]
        self._groups = sub_groups(self._parts, setting.strategy.sub_group_elements)
        self._on_device = num_groups_on_device(
            len(self._groups), setting.strategy.offload_ratio
        )  # of an offloaded optimizer
        self._bucket_parameters: list[int] = []
        self._bucket_elements = 0
        self._oversized: dict[int, int] = {}  # parameter larger than the bucket -> storage of its gradient
        self._held: dict[int, deque[int]] = defaultdict(deque)  # number of a hold -> storages of gathered parameters
        self._norms: list[int] = []  # of own gradients that went to the host
        self._has_states = False
        gathering = self._gathering
        self._at_marks: dict[MarkKind, Callable[[int, int], None]] = {
            MarkKind.FORWARD_BEGINS: lambda *_: gathering.forward_begins(),
            MarkKind.FETCH: lambda module, _: gathering.fetch(module, in_backward=False),
            MarkKind.RELEASE: lambda module, _: gathering.release(module, in_backward=False),
            MarkKind.FETCH_IN_BACKWARD: lambda module, _: gathering.fetch(module, in_backward=True),
            MarkKind.RELEASE_IN_BACKWARD: lambda module, _: gathering.release(module, in_backward=True),
            MarkKind.HOLD: self._hold,
            MarkKind.LET_GO: self._let_go,
            MarkKind.READ: lambda parameter, _: gathering.read(parameter),
        }

    def initialise(self, *, one_by_one: bool) -> None:
        """Split parameters as they arrive, `one_by_one` or all at once, and move the parts of trained ones together.

        (`_setup_for_real_optimizer`, `_create_fp16_partitions_with_defragmentation`)
        """
        stream, setting = self._stream, self._setting
        size = setting.element_bytes
        parts = []
        sizes = [n * item_bytes for n, item_bytes in zip(setting.all_elements, setting.item_bytes, strict=True)]
        there = [] if one_by_one else [stream.born(size_bytes, "building", PARAMETERS) for size_bytes in sizes]
        for i, (size_bytes, is_trained) in enumerate(zip(sizes, setting.trainable, strict=True)):
            whole = stream.born(size_bytes, "to device", PARAMETERS) if one_by_one else there[i]
            part_bytes = setting.part_bytes(i)
            if setting.offloads_parameters:
                part = self._host.pinned(self._host.born(part_bytes, "aten.empty.memory_format", PARAMETERS))
            else:
                part = stream.born(part_bytes, "aten.empty.memory_format", TEMPORARY if is_trained else PARAMETERS)
            if is_trained:
                parts.append(part)  # those of frozen parameters stay as they are
            stream.dies(whole)
        if setting.offloads_parameters:
            self._host.pinned(self._host.born(sum(self._parts) * size, "aten.empty.memory_format", PARAMETERS))
        through_host = None if setting.offloads_parameters else self._host.beside(sum(self._parts) * size)
        for part in parts:
            (self._host if setting.offloads_parameters else stream).dies(part)
        if through_host is not None:
            self._host.dies(through_host)
        if not setting.offloads_parameters:  # by way of the host (`defragment` of zero/utils.py)
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
        largest = max(range(len(self._parts)), key=self._parts.__getitem__)
        whole = stream.born(self._parts[largest] * setting.world_size * size, "aten.empty.memory_format")
        if setting.offloads_parameters:
            stream.flash(self._parts[largest] * size, "aten._to_copy.default")
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
        for number, group in enumerate(self._groups):
            place: Stream | PinnedBlocks = stream if number < self._on_device else host
            is_there = is_same_type and place is parameters_are
            following = -1 if is_there else place.born(group * state_bytes, "aten._to_copy.default")
            if converted >= 0:
                converted_in.dies(converted)
            converted, converted_in = following, place
            place.born(group * state_bytes, "aten.clone.default", OPTIMIZER)
        if converted >= 0:
            converted_in.dies(converted)
        shared = host.born(max(self._groups) * state_bytes, "aten.zeros.default")
        copied = -1
        for number, group in enumerate(self._groups):
            gradient = host.born(group * state_bytes, "aten.zeros.default", GRADIENTS)
            if copied >= 0:
                host.dies(copied)
            gradient, copied = host.pinned(gradient), -1
            if number < self._on_device:
                stream.born(group * state_bytes, "aten._to_copy.default", GRADIENTS)
                copied = gradient
        host.dies(shared)

    @property
    def gathers(self) -> tuple[int, int]:
        """The all-gathers of the last micro-step and the elements they brought."""
        return self._gathering.num_gathers, self._gathering.gathered_elements

    def begin(self, *, is_boundary: bool) -> None:
        """Begin a backward; `is_boundary`: the optimizer step comes after it."""
        self._is_boundary = is_boundary

    def module(self, kind: MarkKind, number: int, hold: int) -> None:
        """Handle a mark of ZeRO-3."""
        self._at_marks[kind](number, hold)

    def _hold(self, parameter: int, hold: int) -> None:
        self._held[hold].append(self._gathering.storage(parameter))
        self._stream.hold(self._held[hold][-1])

    def _let_go(self, _parameter: int, hold: int) -> None:
        self._stream.release(self._held[hold].popleft())  # of the earlier micro-step, whose graph may end after forward

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
        self._micro_step += 1

    def step(self) -> None:
        """Take the optimizer step, one group of parts after the other (`step`)."""
        stream = self._stream
        self._gathering.split_all()
        self._micro_step = 0
        if self._setting.offloads_optimizer:
            self._step_on_host()
            self._gathering.gather_persistent()
            return
        for norm in [stream.norm(part) for part in self._parts]:
            stream.dies(norm)
        for group, num_parameters in zip(self._groups, self._group_lengths(), strict=True):
            state_bytes = self._setting.state_bytes
            gradient = stream.born(group * 4, "aten.cat.default") if num_parameters > 1 else -1
            if state_bytes < 4:
                rounded = stream.born(group * state_bytes, "aten._to_copy.default")
                stream.dies(gradient)
                gradient = rounded
            if not self._has_states:
                self._setting.make_states(group, stream)
            stream.dies(gradient)
        self._has_states = True
        self._gathering.gather_persistent()

    def _step_on_host(self) -> None:
        if not self._has_states:
            for number, group in enumerate(self._groups):
                self._setting.make_states(group, self._stream if number < self._on_device else self._host)
        self._has_states = True
        for norm in self._norms:
            self._stream.dies(norm)
        self._norms.clear()

    def _group_lengths(self) -> list[int]:
        lengths, elements = [0], 0
        for part in self._parts:
            if elements == self._groups[len(lengths) - 1]:
                lengths.append(0)
                elements = 0
            lengths[-1] += 1
            elements += part
        return lengths

    def _flush(self) -> None:
        """Reduce-scatter what is in the bucket; own parts are copied or added to the gradient buffer.

        (`__reduce_and_partition_ipg_grads`)
        """
        if not self._bucket_parameters:
            return
        stream, setting = self._stream, self._setting
        size = setting.element_bytes
        elements = [setting.elements[parameter] for parameter in sorted(self._bucket_parameters)]
        together = -1
        if len(elements) > 1 or elements[0] % setting.world_size:
            padded = sum(-(-n // setting.world_size) * setting.world_size for n in elements)
            together = stream.born(padded * size, "aten.new_empty.default", COMMUNICATION)
        parts = [self._own_part(n) for n in elements]
        copies = []
        if size < 4:
            copies = [stream.born(own * 4, "aten._to_copy.default", COMMUNICATION) for own in parts]
            stream.dies(together)
        if setting.offloads_optimizer:
            self._to_host([own for own in parts if own])
        for parameter in self._bucket_parameters:
            if parameter in self._oversized:
                stream.release(self._oversized.pop(parameter))
        for copy in copies:
            stream.dies(copy)
        if size == 4:
            stream.dies(together)
        self._bucket_parameters.clear()
        self._bucket_elements = 0

    def _own_part(self, elements: int) -> int:
        """Return the elements of a parameter that are really this rank's; the last ranks may have less than a part."""
        part = -(-elements // self._setting.world_size)
        return max(0, min(part, elements - part * self._setting.rank))

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
            if self._is_boundary:
                self._norms.append(stream.norm(own, COMMUNICATION))
                if self._setting.state_bytes < 4:
                    stream.flash(own * self._setting.state_bytes, "aten._to_copy.default", COMMUNICATION)
        stream.dies(previous)
