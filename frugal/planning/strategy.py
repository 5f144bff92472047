"""The ways to lay out a run in memory, and those that a request allows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal

from frugal.config.layers import LayerMode
from frugal.config.optimizers import OptimizerImplementation
from frugal.config.request import Request
from frugal.errors import refuse
from frugal.planning.model_facts import FUSED_LOSS, ModelFacts

Place = Literal["none", "cpu", "nvme"]
ActivationCheckpointing = Literal["off", "selective", "full", "offloaded", "budget"]
Loss = Literal["plain", "tiled"]
Kernels = Literal["plain", "liger"]
LAYER_MODES: tuple[LayerMode, ...] = ("offloaded", "full", "selective", "off")
"""The modes of activation checkpointing of a layer, the most frugal first."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Everything that changes memory or time, apart from the micro-batch.

    Attributes:
        zero_stage: 0 replicates; 1 splits optimizer states, 2 also gradients, 3 also parameters.
        activation_checkpointing: `off` keeps every activation; `selective` each layer's inputs and the results of
            its expensive operators; `full` each layer's inputs; `offloaded` those too, but in host memory; `budget`
            gives each layer one of these, see `layer_modes`.
        layer_modes: under `budget` the modes of all layers in the order in which they run, as runs of equal ones:
            `(("full", 20), ("off", 12))`. Otherwise empty.
        sequence_parallel: ranks that share each sample, a part of its positions each (Ulysses); 1: none do.
        loss: `plain` holds the whole logits, `tiled` a slice of them at a time.
        mlp: `plain` runs a layer's MLP on all positions, `tiled` on a slice at a time, and again in backward.
        kernels: `liger` runs norms, rotations, gated MLPs and the tiled loss in fused kernels.
        offload_optimizer: where optimizer states live; the optimizer runs on the host unless it is `none`.
        offload_ratio: ZeRO-3 with the optimizer in host memory, the share of the sub-groups that are updated there;
            the first ones are updated on the device, see `num_groups_on_device`.
        offload_parameters: where parameters live between uses (ZeRO-3 only).
        nvme_path: the folder of what lives on NVMe.
        nvme_buffer_elements: of one of the host's buffers for parameters on NVMe; it holds a rank's part of any.
        gradient_accumulation_dtype: of the gradient summed over micro-steps.
        reduce_bucket_elements: gradient elements that travel together; a buffer of this size is allocated.
        prefetch_bucket_elements: ZeRO-3, parameter elements gathered ahead of their use.
        max_live_elements: ZeRO-3, gathered parameter elements kept at most.
        persistence_threshold_elements: ZeRO-3, parameters up to this size stay gathered.
        sub_group_elements: ZeRO-3, elements updated together in the optimizer step.
        overlap_comm: gradients travel while backward goes on, from a second bucket and a stream of their own.
        small_buckets: the four sizes before `sub_group_elements` are an eighth of the usual ones.
        expandable_segments: torch's caching allocator for GPUs has one segment that grows, not many.
    """

    zero_stage: int
    activation_checkpointing: ActivationCheckpointing = "off"
    layer_modes: tuple[tuple[LayerMode, int], ...] = ()
    sequence_parallel: int = 1
    loss: Loss = "plain"
    mlp: Literal["plain", "tiled"] = "plain"
    kernels: Kernels = "plain"
    offload_optimizer: Place = "none"
    offload_ratio: float = 1.0
    offload_parameters: Place = "none"
    nvme_path: str | None = None
    nvme_buffer_elements: int = 0
    gradient_accumulation_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    reduce_bucket_elements: int = 20_000_000
    prefetch_bucket_elements: int = 20_000_000
    max_live_elements: int = 50_000_000
    persistence_threshold_elements: int = 100_000
    sub_group_elements: int = 100_000_000
    overlap_comm: bool = False
    small_buckets: bool = False
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.zero_stage <= 3
        assert (self.activation_checkpointing == "budget") == (len(self.layer_modes) > 1), "budget mixes modes"
        assert all(count > 0 for _, count in self.layer_modes)
        assert all(first[0] != second[0] for first, second in pairwise(self.layer_modes))
        assert not self.overlap_comm or self.zero_stage >= 1
        assert self.offload_optimizer == "none" or self.zero_stage >= 1
        is_in_part = self.zero_stage == 3 and self.offload_optimizer == "cpu" and self.offload_parameters == "none"
        assert self.offload_ratio == 1 or (is_in_part and 0 < self.offload_ratio < 1)
        assert self.offload_parameters == "none" or (self.zero_stage == 3 and self.offload_optimizer != "none")
        on_disk = "nvme" in self._places
        assert not on_disk or (self.zero_stage == 3 and self.nvme_path)
        assert self.offload_parameters != "nvme" or (self.nvme_buffer_elements and self.mlp == "plain")

    @property
    def modes(self) -> tuple[LayerMode, ...]:
        """The modes of activation checkpointing of the layers."""
        if self.activation_checkpointing == "budget":
            return tuple(dict.fromkeys(mode for mode, _ in self.layer_modes))
        return (self.activation_checkpointing,)

    @property
    def where_the_host_is_the_device(self) -> "Strategy":
        """The strategy on CPU ranks, where there is no other memory to move layers' inputs to."""
        if "offloaded" not in self.modes:
            return self
        modes: list[tuple[LayerMode, int]] = [
            ("full" if mode == "offloaded" else mode, count) for mode, count in self.layer_modes
        ]
        runs = tuple((mode, sum(count for _, count in run)) for mode, run in groupby(modes, key=lambda each: each[0]))
        if len(runs) > 1:
            return replace(self, layer_modes=runs)
        return replace(self, activation_checkpointing="full", layer_modes=())

    def share(self, mode: LayerMode) -> float:
        """Return the share of the layers that have this mode."""
        if self.activation_checkpointing != "budget":
            return float(self.activation_checkpointing == mode)
        of_mode = sum(count for each, count in self.layer_modes if each == mode)
        return of_mode / sum(count for _, count in self.layer_modes)

    @property
    def num_mechanisms(self) -> int:
        """A measure of complexity: each kind of state that is split or moved, and recomputation, counts one.

        Moving inputs to the host, or choosing what to recompute, counts one more, and so does each change of the mode
        from one layer to the next. A tiled loss does none of this, so it is as simple as whole logits.
        """
        return (
            self.zero_stage
            + sum({"off": 0, "selective": 2, "full": 1, "offloaded": 2}[mode] for mode in self.modes)
            + len(self.layer_modes[1:])
            + (self.sequence_parallel > 1)
            + (self.mlp == "tiled")
            + (self.offload_optimizer != "none")
            + (self.offload_ratio < 1)
            + (self.offload_parameters != "none")
            + (self.offload_optimizer == "nvme")
            + (self.offload_parameters == "nvme")
            + self.overlap_comm
            + self.small_buckets
        )

    @property
    def frugality(self) -> tuple[float, ...]:
        """Sort key by how little is kept on the device."""
        kept = max(("off", "selective", "full", "offloaded").index(mode) for mode in self.modes)
        moved = [("none", "cpu", "nvme").index(place) for place in self._places]
        moved_share = sum(moved) and self.offload_ratio
        tiled = int(self.loss == "tiled"), int(self.mlp == "tiled")
        return (*moved, moved_share, self.zero_stage, kept, *tiled, int(self.small_buckets))

    @property
    def checkpointing(self) -> str:
        """The mode of activation checkpointing in words: `full for 20 of 32 layers`."""
        if self.activation_checkpointing != "budget":
            return self.activation_checkpointing
        num_layers = sum(count for _, count in self.layer_modes)
        words = [f"{mode} for {count}" for mode, count in self.layer_modes if mode != "off"]
        return f"{' and '.join(words)} of {num_layers} layers"

    def __str__(self) -> str:
        words = {
            f"ZeRO-{self.zero_stage}": True,
            f"activation checkpointing {self.checkpointing}": True,
            f"sequence parallelism over {self.sequence_parallel} ranks": self.sequence_parallel > 1,
            "tiled loss": self.loss == "tiled",
            "tiled MLP": self.mlp == "tiled",
            "Liger's kernels": self.kernels == "liger",
            self._offloading: self.offload_optimizer != "none",
            "small buckets": self.small_buckets,
            "communication overlapped": self.overlap_comm,
        }
        return ", ".join(word for word, is_said in words.items() if is_said)

    @property
    def _offloading(self) -> str:
        if self.offload_ratio < 1:
            return f"{100 * self.offload_ratio:.3g} % of the optimizer in host memory"
        optimizer, parameters = (
            {"none": "", "cpu": "in host memory", "nvme": "on NVMe"}[place] for place in self._places
        )
        if optimizer == parameters:
            return f"optimizer and parameters {optimizer}"
        return f"optimizer {optimizer}" + (f", parameters {parameters}" if parameters else "")

    @property
    def _places(self) -> tuple[Place, Place]:
        return self.offload_optimizer, self.offload_parameters


def sub_groups(parts: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the elements of each group of a rank's parts that ZeRO-3 updates together.

    A group ends with the part that brings it to `most` (DeepSpeed's `_create_fp16_sub_groups`).
    """
    if most >= sum(parts):
        return (sum(parts),)
    groups, elements = [], 0
    for number, part in enumerate(parts):
        elements += part
        if elements >= most or number == len(parts) - 1:
            groups.append(elements)
            elements = 0
    return tuple(groups)


def num_groups_on_device(num_groups: int, offload_ratio: float) -> int:
    """Return how many sub-groups of an optimizer in host memory are updated on the device: the first ones.

    DeepSpeed's own rounding (`_create_fp32_partitions`): 0.9 of ten groups leaves none, for 1 - 0.9 is below 0.1.
    """
    return int((1 - offload_ratio) * num_groups)


def share_on_host(sizes: Sequence[int], strategy: Strategy, world_size: int) -> float:
    """Return the share of the trained elements that is updated in host memory; `sizes` are those of the parameters."""
    if strategy.offload_optimizer == "none":
        return 0.0
    if strategy.offload_ratio == 1:
        return 1.0
    groups = sub_groups([-(-size // world_size) for size in sizes], strategy.sub_group_elements)
    return sum(groups[num_groups_on_device(len(groups), strategy.offload_ratio) :]) / max(1, sum(groups))


Offload = Literal["none", "optimizer", "all", "nvme"]

BUCKET_ELEMENTS = 20_000_000
"""Gradient elements that travel together: far beyond what saturates a link (a few MB), and 80 MB at most in fp32."""

SMALLER = 8
"""How many times smaller small buckets are."""


def offload_levels(request: Request, *, on_gpus: bool = True) -> tuple[Offload, ...]:
    """Return the levels of offloading to try, in order: nothing is moved unless it must be, or was asked for.

    A CPU rank's memory is the host's already.
    """
    if request.offload_ratio not in (None, 1):
        what = f"--offload optimizer:{request.offload_ratio:g} is impossible on CPU ranks"
        refuse((not on_gpus, what, "their memory is the host's already", "use --offload optimizer"))
        return ("optimizer",)
    if request.offload != "auto":
        return (request.offload,)
    if not on_gpus or not request.optimizer.can_be_on_host:
        return ("none",)
    # DeepSpeed moves only states in fp32 to disk.
    has_disk = request.nvme_path and request.optimizer.states != "bf16"
    return ("none", "optimizer", "all", "nvme") if has_disk else ("none", "optimizer", "all")


def optimizer_implementation(request: Request, strategy: Strategy) -> OptimizerImplementation | None:
    """Return whose kernels update the parameters; None: the library's only ones.

    States in bf16, or a part of the states, live on the host only with DeepSpeed's own CPU Adam.
    """
    if strategy.offload_optimizer != "none" and (request.optimizer.states == "bf16" or strategy.offload_ratio < 1):
        return "deepspeed"
    return request.optimizer.kernels


PLACES: dict[Offload, tuple[tuple[Place, Place], ...]] = {
    "none": (("none", "none"),),
    "optimizer": (("cpu", "none"),),
    "all": (("cpu", "cpu"),),
    "nvme": (("nvme", "cpu"), ("nvme", "nvme")),
}
"""Where optimizer and parameters may live at each level of offloading."""


def _stages(request: Request, offload: Offload, world_size: int) -> tuple[int, ...]:
    """Return the ZeRO stages to try; none where the pinned one cannot offload so much.

    bf16 and fp16 take only stages 2 and 3, because stage 0 starts Adam at its second step and stage 1 loses gradients
    under fp32 accumulation. On one GPU the stages split nothing, so the lowest is enough.
    """
    needed = {"none": 0, "optimizer": 1, "all": 3, "nvme": 3}[offload]
    if request.offload_ratio not in (None, 1):
        needed = 3
    if request.zero_stage is not None:
        return (request.zero_stage,) if request.zero_stage >= needed else ()
    lowest = max(needed, 2 if request.precision != "fp32" else 0)
    return tuple(range(lowest, 4)) if world_size > 1 else (lowest,)


Modes = tuple[ActivationCheckpointing, tuple[tuple[LayerMode, int], ...]]
"""`Strategy.activation_checkpointing` and `Strategy.layer_modes`."""


def _modes(request: Request, can_recompute: bool, on_gpus: bool) -> list[Modes]:
    """Return the modes to try; `offloaded` on GPUs only: a CPU rank has no other memory to use."""
    if request.layer_modes is not None:
        runs = request.layer_modes.runs
        return [("budget", runs) if len(runs) > 1 else (runs[0][0], ())]
    if request.activation_checkpointing != "auto" and request.activation_checkpointing != "budget":
        return [(request.activation_checkpointing, ())]
    modes: list[LayerMode] = ["off", "full", "selective", "offloaded"] if can_recompute else ["off"]
    return [(mode, ()) for mode in modes if on_gpus or mode != "offloaded"]


def allowed_strategies(
    request: Request,
    facts: ModelFacts,
    *,
    world_size: int,
    offload: Offload,
    on_gpus: bool = True,
    small_buckets: bool = False,
    tiled_mlp: bool = False,
) -> tuple[Strategy, ...]:
    """Return the strategies a request and its model allow at one level of offloading, simplest first.

    Communication is never overlapped: what that holds back on CUDA's streams has not been measured on a GPU, and a plan
    that does not fit is worse than one that is slower.

    `small_buckets`: for where the usual ones take much of the memory; not with stage 0. `tiled_mlp`: with one; not with
    selective checkpointing.
    """
    stages = _stages(request, offload, world_size)
    modes = _modes(request, facts.can_recompute, on_gpus)
    usual, live = min(BUCKET_ELEMENTS, max(1, facts.trainable_parameters)), Strategy.max_live_elements
    if small_buckets:
        usual, live = max(1, usual // SMALLER), live // SMALLER
        stages = tuple(stage for stage in stages if stage)
    tiled_mlp = tiled_mlp or request.mlp == "tiled"
    if tiled_mlp:
        modes = [each for each in modes if "selective" not in (each[0], *(mode for mode, _ in each[1]))]
    losses: tuple[Loss, ...] = ("plain", "tiled") if facts.can_tile else ("plain",)
    if request.loss != "auto":
        losses = (request.loss,)
    strategies = (
        Strategy(
            zero_stage=stage,
            activation_checkpointing=mode,
            layer_modes=runs,
            sequence_parallel=request.sequence_parallel or 1,
            loss=loss,
            mlp="tiled" if tiled_mlp else "plain",
            kernels="liger" if any(each != FUSED_LOSS or loss == "tiled" for each in facts.fused) else "plain",
            offload_optimizer=optimizer,
            offload_parameters=parameters,
            nvme_path=request.nvme_path if offload == "nvme" else None,
            nvme_buffer_elements=-(-facts.largest_parameter // world_size) if parameters == "nvme" else 0,
            reduce_bucket_elements=usual + usual % 2,  # even: DeepSpeed starts ranks' parts at multiples of two
            # A gathered parameter keeps its buffer for the way from disk, and DeepSpeed fails when it runs out of them.
            prefetch_bucket_elements=0 if parameters == "nvme" else usual,
            max_live_elements=0 if parameters == "nvme" else live,
            small_buckets=small_buckets,
            expandable_segments=on_gpus and request.expandable_segments is not False,
            gradient_accumulation_dtype=request.optimizer.gradient_accumulation_dtype,
        )
        for stage in stages
        for mode, runs in modes
        for loss in losses
        for optimizer, parameters in PLACES[offload]
    )
    if request.offload_ratio not in (None, 1):
        number = facts.trainable_parameters
        strategies = (in_part(each, request.offload_ratio, number, world_size) for each in strategies)
    return tuple(sorted(strategies, key=lambda strategy: strategy.num_mechanisms))


RATIOS = tuple(eighths / 8 for eighths in range(1, 8))
"""Shares of the optimizer's work on the host to try, fastest first. Eighths are exact in binary, see
`num_groups_on_device`."""

SUB_GROUPS_IN_PART = 32
"""Sub-groups where a part of them is on the device: groups hold whole parameters, and so many come within 3 % of an
eighth where no parameter is larger than a group."""


def in_part(strategy: Strategy, ratio: float, trainable_parameters: int, world_size: int) -> Strategy:
    """Return `strategy`, whose optimizer is in host memory, with only a share of it there.

    DeepSpeed counts sub-groups, of which the usual size makes one or two: they are made smaller.
    """
    of_rank = -(-trainable_parameters // world_size)
    most = max(1, min(strategy.sub_group_elements, of_rank // SUB_GROUPS_IN_PART))
    return replace(strategy, offload_ratio=ratio, sub_group_elements=most)


MODES_NOTE = "full, selective, offloaded: activation checkpointing"
"""The note of a table with `brief_name`."""


def short_name(strategy: Strategy) -> str:
    """Return the strategy's text without activation checkpointing that is off."""
    plain = strategy.activation_checkpointing == "off"
    return str(strategy).replace(", activation checkpointing off", "") if plain else str(strategy)


def brief_name(strategy: Strategy) -> str:
    """Return the strategy in few words, for narrow tables, whose rows all have the same kernels."""
    in_full = short_name(strategy).replace(", Liger's kernels", "").replace(" in host memory", " on the host")
    return in_full.replace("activation checkpointing ", "")
