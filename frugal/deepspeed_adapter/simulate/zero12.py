"""ZeRO-1 and 2: gradients and states cut into equal parts.

Names in brackets are methods of `DeepSpeedZeroOptimizer` in deepspeed/runtime/zero/stage_1_and_2.py.

All trainable parameters lie end to end in one flat tensor, padded to `2 * ranks` elements (`__init__`); rank `r` owns
its `r`-th part. Gradients are copied into a bucket as autograd finishes them (`process_gradients`); a full bucket is
reduced (`reduce_ipg_grads`).
"""

from frugal.deepspeed_adapter.simulate.stream import PinnedBlocks, Setting, Stream
from frugal.planning.memory.timeline import COMMUNICATION, GRADIENTS, OPTIMIZER, PARAMETERS, MarkKind


class SimulatedZero12:
    """The ZeRO-1 or ZeRO-2 optimizer of one rank."""

    def __init__(self, stream: Stream, host: PinnedBlocks, setting: Setting) -> None:
        self._stream = stream
        self._host = host
        self._setting = setting
        self._is_boundary = True
        elements = setting.elements
        self._padding = -sum(elements) % (2 * setting.world_size)
        self._flat_elements = sum(elements) + self._padding
        self._part = self._flat_elements // setting.world_size
        self._starts = [0]
        for n in elements:
            self._starts.append(self._starts[-1] + n)
        low, high = setting.rank * self._part, (setting.rank + 1) * self._part
        # Of each parameter that the own part touches: how many of its elements lie in it.
        self._own = {
            i: min(start + n, high) - max(start, low)
            for i, (start, n) in enumerate(zip(self._starts, elements, strict=False))
            if n and min(start + n, high) > max(start, low)
        }
        # Gradients summed in fp32 while the model's are smaller live in one buffer
        # (`_use_compact_grad_partition_buffer`); others stay as they are.
        self._compact = setting.element_bytes < 4
        self._bucket = -1
        self._bucket_parameters: list[int] = []
        self._bucket_elements = 0
        self._oversized: dict[int, int] = {}  # parameter larger than the bucket -> storage of its gradient
        self._averaged = -1  # the compact buffer
        self._copies: list[int] = []  # buffers of own gradients, one a micro-step; what they sum up in is the first
        self._copied = -1  # that of this micro-step
        self._accumulated: dict[int, int] = {}  # ZeRO-1: parameter -> storage of its gradient
        self._padding_zeros = -1
        self._states: list[int] = []
        self._norms: list[int] = []  # of own gradients that went to the host

    def initialise(self, parameters: list[int]) -> None:
        """Make the flat parameters from the model's trainable ones on the device.

        (`__init__`, `initialize_optimizer_states`)
        """
        stream, setting = self._stream, self._setting
        size = setting.element_bytes
        stream.empty_cache()
        padding = stream.born(self._padding * size, "aten.zeros.default")
        stream.born(self._flat_elements * size, "aten.cat.default", PARAMETERS)
        for parameter in parameters:
            stream.dies(parameter)
        stream.dies(padding)
        if setting.offloads_optimizer:
            self._initialise_on_host()
        elif size == setting.state_bytes:
            stream.born(self._part * size, "aten.clone.default", OPTIMIZER)
        else:
            clone = stream.born(self._part * size, "aten.clone.default")
            stream.born(self._part * setting.state_bytes, "aten._to_copy.default", OPTIMIZER)
            stream.dies(clone)
        if not setting.offloads_optimizer:
            stream.flash(self._part * setting.state_bytes, "aten.zeros.default")

    def _initialise_on_host(self) -> None:
        """Make master weights, their copy in the model's type, their gradient, and buffers for the largest gradient.

        (`__init__`, `initialize_optimizer_states`)
        """
        stream, host, size = self._stream, self._host, self._setting.element_bytes
        state_bytes = self._setting.state_bytes
        clone = stream.born(self._part * size, "aten.clone.default")
        master = host.born(self._part * state_bytes, "aten._to_copy.default", OPTIMIZER)
        stream.dies(clone)
        host.pinned(master)
        copy = host.born(self._part * size, "aten.full.default", PARAMETERS)
        pinned_copy = host.pinned(copy, keep=True)
        largest = max(self._setting.elements) * size
        host.pinned(host.born(largest, "aten.zeros.default", GRADIENTS))
        stream.born(largest, "aten.zeros.default", GRADIENTS)
        host.pinned(host.born(self._part * state_bytes, "aten.zeros.default", GRADIENTS))
        if pinned_copy != copy:
            host.dies(copy)  # a local variable to the end

    def begin(self, *, is_boundary: bool) -> None:
        """Begin a backward; `is_boundary`: the optimizer step comes after it."""
        self._is_boundary = is_boundary

    def gradient(self, parameter: int, storage: int) -> None:
        """Handle a gradient (`process_gradients`)."""
        if self._bucket < 0:
            size = self._setting.element_bytes
            self._bucket = self._stream.born(
                self._setting.strategy.reduce_bucket_elements * size, "aten.empty.memory_format", COMMUNICATION
            )
        if self._setting.strategy.zero_stage == 2:
            self._stream.hold(storage)
            self._into_bucket(parameter, storage)
        elif parameter not in self._accumulated:  # later micro-steps are added in place
            self._stream.hold(storage)
            self._stream.relabel(storage, GRADIENTS)
            self._accumulated[parameter] = storage

    def module(self, kind: MarkKind, number: int, hold: int) -> None:
        """Do nothing: modules have their parameters at hand."""

    def end(self) -> None:
        """End backward (`independent_gradient_partition_epilogue`)."""
        if self._setting.strategy.zero_stage == 1:
            if not self._is_boundary:
                return  # the bucket stays, too
            for parameter in sorted(self._accumulated):
                self._into_bucket(parameter, self._accumulated[parameter])
            self._accumulated.clear()
        self._flush()
        if self._compact:
            if self._is_boundary and not self._setting.offloads_optimizer:
                self._compact_buffer()
        elif self._is_boundary:
            missing = self._part - sum(self._own.values())
            self._padding_zeros = self._stream.born(missing * 4, "aten.zeros.default", GRADIENTS)
        for storage in self._oversized.values():
            self._stream.release(storage)
        self._oversized.clear()
        if self._copied >= 0 and self._copied != self._copies[0]:
            self._stream.dies(self._copied)
            self._copies.pop()
        elif self._copied >= 0:
            self._stream.relabel(self._copied, GRADIENTS)
        self._copied = -1
        self._stream.dies(self._bucket)
        self._bucket = -1

    def step(self) -> None:
        """Take the optimizer step (`step`)."""
        stream, setting = self._stream, self._setting
        if setting.offloads_optimizer:
            self._step_on_host()
            return
        for norm in [stream.norm(n) for n in self._own.values()]:
            stream.dies(norm)
        gradient = self._averaged
        if not self._compact:
            pieces = len(self._own) + (self._padding_zeros >= 0)
            gradient = stream.born(self._part * 4, "aten.cat.default", GRADIENTS) if pieces > 1 else -1
            if gradient >= 0:
                self._drop_copies()
        elif setting.state_bytes < 4:
            gradient = stream.born(self._part * setting.state_bytes, "aten._to_copy.default", GRADIENTS)
            stream.dies(self._averaged)
        if not self._states:
            self._states = setting.make_states(self._part, stream)
        self._drop_copies()
        stream.dies(gradient)
        self._averaged = -1

    def _step_on_host(self) -> None:
        if not self._states:
            self._states = self._setting.make_states(self._part, self._host)
        for norm in self._norms:
            self._stream.dies(norm)
        self._norms.clear()
        self._stream.dies(self._averaged)
        self._averaged = -1

    def _drop_copies(self) -> None:
        for copy in self._copies:
            self._stream.dies(copy)
        self._copies.clear()
        self._stream.dies(self._padding_zeros)
        self._padding_zeros = -1

    def _into_bucket(self, parameter: int, storage: int) -> None:
        """Copy a gradient, which is held, into the bucket; one that is too large waits for the flush.

        (`reduce_independent_p_g_buckets_and_remove_grads`)
        """
        n = self._setting.elements[parameter]
        if self._bucket_elements + n > self._setting.strategy.reduce_bucket_elements:
            self._flush()
        if n > self._setting.strategy.reduce_bucket_elements:
            self._oversized[parameter] = self._cloned(storage, n) if self._setting.offloads_optimizer else storage
        else:
            self._stream.release(storage)
        self._bucket_elements += n
        self._bucket_parameters.append(parameter)

    def _cloned(self, storage: int, elements: int) -> int:
        """Hold a copy of a gradient in its place (`reduce_independent_p_g_buckets_and_remove_grads`)."""
        clone = self._stream.born(elements * self._setting.element_bytes, "aten.clone.default", COMMUNICATION)
        self._stream.hold(clone)
        self._stream.dies(clone)  # when it is released
        self._stream.release(storage)
        return clone

    def _flush(self) -> None:
        """Reduce what is in the bucket and keep the own parts (`reduce_ipg_grads`)."""
        slices = self._slices()
        if self._compact and any(is_own for _, is_own in slices):
            self._compact_buffer()
        group: list[tuple[int, bool]] = []
        for piece in slices:
            group.append(piece)
            if sum(n for n, _ in group) > self._setting.strategy.reduce_bucket_elements:
                self._reduce(group)
                group = []
        if group:
            self._reduce(group)
        for parameter in self._bucket_parameters:
            if parameter in self._own:
                if self._compact and self._setting.offloads_optimizer and self._is_boundary:
                    self._norms.append(self._stream.norm(self._own[parameter], COMMUNICATION))
                    if self._setting.state_bytes < 4:
                        rounded_bytes = self._own[parameter] * self._setting.state_bytes
                        self._stream.flash(rounded_bytes, "aten._to_copy.default", COMMUNICATION)
                elif self._compact:
                    continue  # an oversized gradient lives on to the end of backward
                elif self._copied < 0:
                    kept = sum(self._setting.elements[own] for own in self._own)
                    self._copied = self._stream.born(kept * 4, "aten.empty.memory_format", COMMUNICATION)
                    self._copies.append(self._copied)
            elif self._setting.strategy.zero_stage == 1:
                continue
            if parameter in self._oversized:
                self._stream.release(self._oversized.pop(parameter))
        self._bucket_parameters.clear()
        self._bucket_elements = 0

    def _slices(self) -> list[tuple[int, bool]]:
        """Cut the bucket by owner: elements, and whether they are this rank's.

        Neighbours of one owner are merged, except own ones that have an output of their own (`average_tensor`).
        """
        slices: list[tuple[int, bool]] = []
        previous = -1
        for parameter in self._bucket_parameters:
            start = self._starts[parameter]
            end = start + self._setting.elements[parameter]
            for owner in range(start // self._part, (end - 1) // self._part + 1):
                n = min(end, (owner + 1) * self._part) - max(start, owner * self._part)
                is_own = owner == self._setting.rank
                if owner == previous and not (is_own and self._compact):
                    slices[-1] = (slices[-1][0] + n, is_own)
                else:
                    slices.append((n, is_own))
                previous = owner
        return slices

    def _reduce(self, group: list[tuple[int, bool]]) -> None:
        """All-reduce slices together; own ones are added to the fp32 buffer.

        (`allreduce_and_copy_with_multiple_ranks`)
        """
        size = self._setting.element_bytes
        together = -1
        if len(group) > 1:
            together = self._stream.born(sum(n for n, _ in group) * size, "aten.cat.default", COMMUNICATION)
        if self._compact:
            for n, is_own in group:
                if is_own:
                    self._stream.flash(n * 4, "aten._to_copy.default", COMMUNICATION)
        self._stream.dies(together)

    def _compact_buffer(self) -> None:
        if self._averaged < 0:
            self._averaged = self._stream.born(self._part * 4, "aten.zeros.default", GRADIENTS)
