"""The settings of a configuration, with the same names for all tools, and the place of each.

A reader fills `Settings` from one tool's file. Unknown fields are listed (`unknown`); known ones that frugal cannot
follow are a deviation, or a reason not to check at all (`refusals`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from frugal.config.adapters import Lora
from frugal.config.optimizers import Optimizer
from frugal.config.request import Precision, Task
from frugal.tools.check.document import Place

Level = Literal["error", "warning", "note"]

MAY_DECIDE_MEMORY = re.compile(
    r"^(?!(data|preproc|eval|test|val|log|save|hub|wandb|swanlab|trackio|mlflow|comet|tokenizer|report)[a-z]*_)(\w+_)?("
    r"q?lora|dora|oft|vera|peft|adapt|modules|layers|rank|r$|freeze|frozen|unfr|tune|trainable|"  # adapters
    r"quant|double_quant|bits?(_|$)|load_in|\d+_?bit|n?v?fp\d|int\d|gptq|awq|aqlm|hqq|eetq|bnb|qat|onebit|dtype|precision|"
    r"batch|len|max_?len|seq|tokens?(_|$)|pack|multipack|cutoff|context|"
    r"parallel|pipeline|megatron|tensor(?!board)|shard|fsdp|zero(_|\d)|deepspeed|dist(_|$)|expert|moe|[tcspe]p_|offload|cpu|"
    r"kt(_|$)|replicate|"
    r"vision|visual|image|video|audio|speech|pixel|mm_|multi_?modal|tower|projector|vit(_|$)|"
    r"ref(_|$)|reference|reward|rl(_|$)|dpo|kto|grpo|ppo|pref(?!ix|etch)|teacher|distil|kd_|critic|rollout|vllm|ebft|diffusion|hatchery|"
    r"kernel|sonicmoe|scattermoe|attn|attention|flash|unsloth|liger|compile|checkpointing(?!_steps)|recompute|"
    r"galore|apollo|badam|lisa|relora|muon|asft|optim|embed|vocab|head|model_config|model_args"
    r")"
)
"""Names of fields that are of adapters, quantisation, lengths, parallelism, images, references, kernels or states."""

AUTO = "auto"
"""The value in DeepSpeed's JSON that another tool is to fill in."""


@dataclass(frozen=True)
class Finding:
    """A trap. `rule` names its kind; `error`: the run does not start, or does not train what it seems to."""

    rule: str
    level: Level
    text: str
    place: Place | None = None
    hint: str | None = None


@dataclass(frozen=True)
class Deviation:
    """A setting that is evaluated differently than written, and the effect of that."""

    text: str
    place: Place | None = None


@dataclass(kw_only=True)
class Settings:
    """The settings of a training run. None: not given.

    Attributes:
        tool: name of the tool that trains.
        micro_batch: samples of one GPU in one forward.
        accumulation_steps: forwards for one optimizer step.
        gpus: processes of one node.
        seq_len: tokens of the longest sample.
        optimizer: the nearest that frugal has; deviations list the differences.
        activation_checkpointing: whether layers are recomputed.
        use_reentrant: of torch's activation checkpointing.
        tiled_loss: the logits are not held whole (Liger, chunked cross entropy).
        tiled_mlp: layers' MLPs run on a slice of the positions at a time.
        sequence_parallel: GPUs that share each sample.
        deepspeed: its JSON as written, with `auto`; None: DeepSpeed is not used.
        fills_auto: whether the tool replaces `auto` in DeepSpeed's JSON.
        places: where each of these was read, by name; those of DeepSpeed's JSON as `json.` and their dotted names.
        read: the fields whose values were read.
        unknown: fields that frugal does not know.
        raw: all values that were read, by the names of `tools.toml`; a trap asks for some.
    """

    tool: str = ""
    model: str | None = None
    task: Task | None = None
    seq_len: int | None = None
    micro_batch: int | None = None
    accumulation_steps: int | None = None
    gpus: int | None = None
    nodes: int | None = None
    precision: Precision | None = None
    optimizer: Optimizer | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    gradient_clipping: float | None = None
    lora: Lora | None = None
    quantize: str | None = None
    activation_checkpointing: bool = False
    use_reentrant: bool | None = None
    use_cache: bool | None = None
    packing: bool = False
    packs_apart: bool | None = None
    tiled_loss: bool = False
    tiled_mlp: bool = False
    sequence_parallel: int = 1
    expandable_segments: bool | None = None
    deepspeed: Mapping[str, Any] | None = None
    fills_auto: bool = False
    raw: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    deviations: list[Deviation] = field(default_factory=list)
    refusals: list[Deviation] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    read: list[Place] = field(default_factory=list)
    unknown: list[Place] = field(default_factory=list)

    def place(self, *names: str) -> Place | None:
        """Return the place of the first of these settings that was read."""
        return next((self.places[name] for name in names if name in self.places), None)

    def block(self, name: str) -> Mapping[str, Any]:
        """Return a block of DeepSpeed's JSON; empty if there is none."""
        return (self.deepspeed or {}).get(name) or {}

    def find(self, rule: str, level: Level, text: str, place: Place | None = None, hint: str | None = None) -> None:
        """Note a trap."""
        self.findings.append(Finding(rule, level, text, place, hint))

    def deviate(self, text: str, place: Place | None = None) -> None:
        """Note a setting that is evaluated differently than written."""
        self.deviations.append(Deviation(text, place))

    def refuse(self, text: str, place: Place | None = None) -> None:
        """Note why memory cannot be checked."""
        self.refusals.append(Deviation(text, place))
