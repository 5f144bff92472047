"""ZeRO-1 and 2: gradients and states cut into equal parts.

Names in brackets are methods of `DeepSpeedZeroOptimizer` in deepspeed/runtime/zero/stage_1_and_2.py.

All trainable parameters lie end to end in one flat tensor, padded to `2 * ranks` elements (`__init__`); rank `r` owns
its `r`-th part. Gradients are copied into a bucket as autograd finishes them (`process_gradients`); a full bucket is
reduced (`reduce_ipg_grads`).
"""

from itertools import accumulate

from frugal.deepspeed_adapter.simulate.stream import (
    PinnedBlocks,
    Setting,
    SimulatedOptimizer,
    Stream,
    pieces_of_a_norm,
    reduced_together,
)
from frugal.planning.memory.timeline import COMMUNICATION, GRADIENTS, OPTIMIZER, PARAMETERS, TEMPORARY


class SimulatedZero12(SimulatedOptimizer):
    """The ZeRO-1 or ZeRO-2 optimizer of one rank."""

    def __init__(self, stream: Stream, host: PinnedBlocks, setting: Setting) -> None:
        super().__init__(stream, host, setting)
        elements = setting.elements
        self._padding = -sum(elements) % (2 * setting.world_size)
        self._flat_elements = sum(elements) + self._padding
        self._part = self._flat_elements // setting.world_size
        self._starts = list(accumulate(elements, initial=0))
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
        self._averaged = -1  # the compact buffer
        self._copies: list[int] = []  # buffers of own gradients, one a micro-step; what they sum up in is the first
        self._copied = -1  # that of this micro-step
        self._accumulated: dict[int, int] = {}  # ZeRO-1: parameter -> storage of its gradient
        self._padding_zeros = -1

    def initialise(self, parameters: list[int]) -> None:
        """Make the flat parameters from the model's trainable ones on the device, and the optimizer's own.

        On a host: master weights, their copy in the model's type, their gradient, and buffers for the largest gradient.
        (`__init__`, `initialize_optimizer_states`)
        """
        stream, host, setting = self._stream, self._host, self._setting
        size, state_bytes = setting.element_bytes, setting.state_bytes
        stream.empty_cache()
        padding = stream.born(self._padding * size, "aten.zeros.default")
        stream.born(self._flat_elements * size, "aten.cat.default", PARAMETERS)
        stream.dies(*parameters, padding)
        if not setting.offloads_optimizer:
            is_master = size == state_bytes
            clone = stream.born(self._part * size, "aten.clone.default", OPTIMIZER if is_master else TEMPORARY)
            if not is_master:
                stream.born(self._part * state_bytes, "aten._to_copy.default", OPTIMIZER)
                stream.dies(clone)
            stream.flash(self._part * state_bytes, "aten.zeros.default")
            return
        clone = stream.born(self._part * size, "aten.clone.default")
        master = host.born(self._part * state_bytes, "aten._to_copy.default", OPTIMIZER)
        stream.dies(clone)
        host.pinned(master)
        copy = host.born(self._part * size, "aten.full.default", GRADIENTS)  # as all that `Zero.kept` knows by no name
        pinned_copy = host.pinned(copy, keep=True)
        largest = max(setting.elements) * size
        host.pinned(host.born(largest, "aten.zeros.default", GRADIENTS))
        stream.born(largest, "aten.zeros.default", GRADIENTS)
        host.pinned(host.born(self._part * state_bytes, "aten.zeros.default", GRADIENTS))
        if pinned_copy != copy:
            host.dies(copy)  # a local variable to the end

    def gradient(self, parameter: int, storage: int) -> None:
        """Handle a gradient (`process_gradients`)."""
        if self._bucket < 0:
            bucket_bytes = self._setting.strategy.reduce_bucket_elements * self._setting.element_bytes
            self._bucket = self._stream.born(bucket_bytes, "aten.empty.memory_format", COMMUNICATION)
        if self._setting.strategy.zero_stage == 2:
            self._stream.hold(storage)
            self._into_bucket(parameter, storage)
        elif parameter not in self._accumulated:  # later micro-steps are added in place
            self._stream.hold(storage)
            self._stream.relabel(storage, GRADIENTS)
            self._accumulated[parameter] = storage

    def end(self) -> None:
        """End backward (`independent_gradient_partition_epilogue`)."""
        if self._setting.strategy.zero_stage == 1:
            if not self.is_boundary:
                return  # the bucket stays, too
            for parameter in sorted(self._accumulated):
                self._into_bucket(parameter, self._accumulated[parameter])
            self._accumulated.clear()
        self._flush()
        if self._compact:
            if self.is_boundary and not self._setting.offloads_optimizer:
                self._make_compact_buffer()
        elif self.is_boundary:
            missing_bytes = 4 * (self._part - sum(self._own.values()))
            self._padding_zeros = self._stream.born(missing_bytes, "aten.zeros.default", GRADIENTS)
        for storage in self._oversized.values():
            self._stream.release(storage)
        self._oversized.clear()
        if self._copied >= 0 and self._copied != self._copies[0]:
            self._stream.dies(self._copies.pop())
        else:
            self._stream.relabel(self._copied, GRADIENTS)
        self._stream.dies(self._bucket)
        self._copied = self._bucket = -1

    def step(self) -> None:
        """Take the optimizer step (`step`)."""
        stream, setting = self._stream, self._setting
        gradient = self._averaged
        if setting.offloads_optimizer:
            if not self._has_states:
                setting.make_states(self._part, self._host)
            stream.dies(*self._norms)
            self._norms.clear()
        else:
            together = self._compact and self._own
            stream.dies(*map(stream.norm, pieces_of_a_norm(self._part) if together else self._own.values()))
            if not self._compact:
                pieces = len(self._own) + (self._padding_zeros >= 0)
                gradient = stream.born(self._part * 4, "aten.cat.default", GRADIENTS) if pieces > 1 else -1
                if gradient >= 0:
                    self._drop_copies()
            elif setting.state_bytes < 4:
                gradient = stream.born(self._part * setting.state_bytes, "aten._to_copy.default", GRADIENTS)
                stream.dies(self._averaged)
            if not self._has_states:
                setting.make_states(self._part, stream)
            self._drop_copies()
        stream.dies(gradient)
        self._averaged, self._has_states = -1, True

    def _drop_copies(self) -> None:
        self._stream.dies(*self._copies, self._padding_zeros)
        self._copies.clear()
        self._padding_zeros = -1

    def _into_bucket(self, parameter: int, storage: int) -> None:
        """Copy a gradient, which is held, into the bucket; one that is too large waits for the flush.

        (`reduce_independent_p_g_buckets_and_remove_grads`)
        """
        stream, setting = self._stream, self._setting
        n, most = setting.elements[parameter], setting.strategy.reduce_bucket_elements
        if self._bucket_elements + n > most:
            self._flush()
        if n > most and setting.offloads_optimizer:  # a copy waits, in its place
            clone = stream.born(n * setting.element_bytes, "aten.clone.default", COMMUNICATION)
            stream.hold(clone)
            stream.dies(clone)  # when it is released
            stream.release(storage)
            self._oversized[parameter] = clone
        elif n > most:
            self._oversized[parameter] = storage
        else:
            stream.release(storage)
        self._bucket_elements += n
        self._bucket_parameters.append(parameter)

    def _flush(self) -> None:
        """Reduce what is in the bucket and keep the own parts (`reduce_ipg_grads`).

        Slices are all-reduced together, own ones are added to the fp32 buffer
        (`allreduce_and_copy_with_multiple_ranks`).
        """
        stream, setting = self._stream, self._setting
        slices = self._slices()
        if self._compact and any(is_own for _, is_own in slices):
            self._make_compact_buffer()
        for group in reduced_together([n for n, _ in slices], setting.strategy.reduce_bucket_elements):
            together = -1
            if len(group) > 1:
                num_bytes = sum(slices[i][0] for i in group) * setting.element_bytes
                together = stream.born(num_bytes, "aten.cat.default", COMMUNICATION)
            stream.dies(together)
        for parameter in self._bucket_parameters:
            if parameter in self._own:
                if self._compact and setting.offloads_optimizer and self.is_boundary:
                    self._norms.append(stream.norm(self._own[parameter], COMMUNICATION))
                    if setting.state_bytes < 4:
                        rounded_bytes = self._own[parameter] * setting.state_bytes
                        stream.flash(rounded_bytes, "aten._to_copy.default", COMMUNICATION)
                elif self._compact:
                    continue  # an oversized gradient lives on to the end of backward
                elif self._copied < 0:
                    kept = sum(setting.elements[own] for own in self._own)
                    self._copied = stream.born(kept * 4, "aten.empty.memory_format", COMMUNICATION)
                    self._copies.append(self._copied)
            elif setting.strategy.zero_stage == 1:
                continue
            if parameter in self._oversized:
                stream.release(self._oversized.pop(parameter))
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

    def _make_compact_buffer(self) -> None:
        if self._averaged < 0:
            self._averaged = self._stream.born(self._part * 4, "aten.zeros.default", GRADIENTS)
