"""The cases of `bench.planning.choice`: a model, its batch, and a strategy whose memory is the budget of all."""

from dataclasses import dataclass
from typing import Literal

from frugal.planning.strategy import ActivationCheckpointing, Strategy


@dataclass(frozen=True, kw_only=True)
class Case:
    """One choice to make.

    Attributes:
        model: as `--model` names it.
        world_size: ranks.
        global_batch: samples.
        seq_len: tokens in a sample.
        zero_stage, activation_checkpointing, loss: of the strategy that just fits into the budget;
        micro_batch: with so many samples at once. Others may fit with more or less, or not at all.
    """

    model: str
    world_size: int
    global_batch: int
    seq_len: int
    zero_stage: int
    activation_checkpointing: ActivationCheckpointing
    loss: Literal["plain", "tiled"]
    micro_batch: int

    @property
    def name(self) -> str:
        """For people."""
        binds = f"{self.activation_checkpointing} {self.loss} ZeRO-{self.zero_stage} micro-batch {self.micro_batch}"
        return f"{self.model.rpartition(':')[2]} on {self.world_size}: {binds}"

    @property
    def binding(self) -> Strategy:
        """The strategy whose memory is the budget."""
        return Strategy(
            zero_stage=self.zero_stage, activation_checkpointing=self.activation_checkpointing, loss=self.loss
        )


def _small(
    model: str, *numbers: int, stage: int, mode: ActivationCheckpointing, micro: int, tiled: bool = False
) -> Case:
    world_size, global_batch, seq_len = numbers
    return Case(
        model=f"bench/planning/choice_models.py:{model}", world_size=world_size, global_batch=global_batch,
        seq_len=seq_len,
        zero_stage=stage, activation_checkpointing=mode, loss="tiled" if tiled else "plain", micro_batch=micro,
    )  # fmt: skip


CPU = (
    _small("deep", 1, 8, 64, stage=0, mode="off", micro=4),
    _small("deep", 1, 8, 64, stage=0, mode="full", micro=4),
    _small("deep", 2, 8, 64, stage=2, mode="off", micro=1),
    _small("deep", 2, 8, 64, stage=3, mode="full", micro=2),
    _small("wide", 1, 8, 64, stage=0, mode="off", micro=2),
    _small("wide", 1, 8, 64, stage=0, mode="selective", micro=1),
    _small("wide", 2, 16, 64, stage=0, mode="off", micro=2),
    _small("wide", 2, 16, 64, stage=2, mode="off", micro=1),
    _small("wide", 2, 16, 64, stage=3, mode="off", micro=2),
    _small("vocabulary", 1, 8, 64, stage=0, mode="off", micro=2),
    _small("vocabulary", 1, 8, 64, stage=0, mode="off", micro=2, tiled=True),
    _small("vocabulary", 2, 16, 64, stage=1, mode="off", micro=2),
    _small("vocabulary", 2, 16, 64, stage=2, mode="full", micro=1, tiled=True),
    _small("long", 1, 4, 1024, stage=0, mode="off", micro=1),
    _small("long", 1, 4, 1024, stage=0, mode="full", micro=1),
    _small("long", 2, 8, 512, stage=1, mode="selective", micro=2),
    _small("classic", 1, 16, 128, stage=0, mode="off", micro=4),
    _small("classic", 2, 16, 128, stage=1, mode="off", micro=2),
    _small("encoder", 1, 16, 128, stage=0, mode="off", micro=2),
    _small("encoder", 2, 16, 128, stage=2, mode="full", micro=2),
    _small("translator", 1, 8, 64, stage=0, mode="off", micro=2),
    _small("translator", 2, 16, 64, stage=1, mode="full", micro=4),
    _small("experts", 1, 16, 64, stage=0, mode="off", micro=4),
    _small("experts", 2, 16, 64, stage=2, mode="off", micro=2),
)


def _preset(model: str, world_size: int, *, stage: int, mode: ActivationCheckpointing, micro: int, tiled: bool) -> Case:
    return Case(
        model=model, world_size=world_size, global_batch=64, seq_len=1024 if model.startswith("gpt") else 512,
        zero_stage=stage, activation_checkpointing=mode, loss="tiled" if tiled else "plain", micro_batch=micro,
    )  # fmt: skip


CUDA = tuple(
    _preset(model, world_size, stage=stage, mode=mode, micro=micro, tiled=tiled)
    for model in ("gpt2", "gpt2-medium", "bert-large", "t5-small")
    for world_size in (1, 2)
    for stage, mode, micro, tiled in ((2, "off", 8, False), (2, "off", 8, True), (3, "full", 4, True))
)
"""bf16. Not run yet."""
