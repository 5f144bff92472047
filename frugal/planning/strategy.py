"""How a run could be laid out in memory."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Everything that changes memory or time, apart from the micro-batch.

    Attributes:
        zero_stage: 0 replicates; 1 splits optimizer states, 2 also gradients, 3 also parameters.
        activation_checkpointing: `off` keeps every activation, `full` keeps each layer's input and recomputes.
        loss: `plain` holds the whole logits, `tiled` a slice of them at a time.
        offload_optimizer: where optimizer states live.
        offload_parameters: where parameters live between uses (ZeRO-3 only).
        gradient_accumulation_dtype: of the gradient summed over micro-steps.
        reduce_bucket_elements: gradient elements that travel together; a buffer of this size is allocated.
        prefetch_bucket_elements: ZeRO-3, parameter elements gathered ahead of their use.
        max_live_elements: ZeRO-3, gathered parameter elements kept at most.
        persistence_threshold_elements: ZeRO-3, parameters up to this size stay gathered.
        sub_group_elements: ZeRO-3, elements updated together in the optimizer step.
    """

    zero_stage: int
    activation_checkpointing: Literal["off", "full"] = "off"
    loss: Literal["plain", "tiled"] = "plain"
    offload_optimizer: Literal["none", "cpu"] = "none"
    offload_parameters: Literal["none", "cpu"] = "none"
    gradient_accumulation_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    reduce_bucket_elements: int = 20_000_000
    prefetch_bucket_elements: int = 20_000_000
    max_live_elements: int = 50_000_000
    persistence_threshold_elements: int = 100_000
    sub_group_elements: int = 100_000_000

    def __post_init__(self) -> None:
        assert 0 <= self.zero_stage <= 3
        assert self.offload_optimizer == "none" or self.zero_stage >= 1
        assert self.offload_parameters == "none" or (self.zero_stage == 3 and self.offload_optimizer == "cpu")
