"""What a ZeRO optimizer is told."""

from dataclasses import dataclass

NUM_STATES = {"adamw": 2, "sgd": 0}
"""Optimizers whose fused kernels take no memory besides the states that they keep of each element."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One rank's part in training.

    Attributes:
        zero_stage: 0-3.
        elements: of every trainable parameter, in the model's order.
        all_elements: of every parameter.
        element_bytes: of the model's type.
        bucket_elements: of the gradient bucket.
        prefetch_elements: ZeRO-3, parameter elements gathered ahead of their use.
        max_live_elements: ZeRO-3, gathered parameter elements at most, and how soon one must be used again to stay.
        persistence_elements: ZeRO-3, parameters up to this size stay gathered.
        sub_group_elements: ZeRO-3, elements updated together.
        num_states: that the optimizer keeps of each element, fp32.
        offloads_optimizer: whether optimizer states live on the host.
        offloads_parameters: whether parameters live on the host, too, between uses.
        world_size: ranks.
        rank: this one.
    """

    zero_stage: int
    elements: tuple[int, ...]
    all_elements: tuple[int, ...]
    element_bytes: int
    bucket_elements: int
    prefetch_elements: int
    max_live_elements: int
    persistence_elements: int
    sub_group_elements: int
    num_states: int
    offloads_optimizer: bool
    offloads_parameters: bool
    world_size: int
    rank: int

    def part_elements(self, parameter: int) -> int:
        """Of one of a parameter's equal parts."""
        return -(-self.all_elements[parameter] // self.world_size)

    def whole_elements(self, parameter: int) -> int:
        """Of one parameter put together from equal parts."""
        return self.part_elements(parameter) * self.world_size
