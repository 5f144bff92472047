"""A file of another trainer: its values, the line of each, and which tool reads it; and `Settings`, which have the same
names for all tools.

JSON and YAML are read as they are. Any other file is taken for a shell script with the command that starts a training
script: its flags are the values, and the launcher's flags stand under `launcher`.

A reader fills `Settings` from one tool's file. Unknown fields are listed (`unknown`); known ones that frugal cannot
follow are a deviation, or a reason not to check at all (`refusals`).
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from frugal import files
from frugal.config.adapters import Lora
from frugal.config.optimizers import Optimizer
from frugal.config.request import Precision, Task
from frugal.deepspeed_adapter.json_config import MICRO_BATCH
from frugal.errors import RequestError, failure, refuse
from frugal.tools.check.command_line import FILES, PROGRAM, parsed_script

Tool = Literal["deepspeed", "transformers", "trl", "axolotl", "llama-factory", "accelerate"]

NAMES: dict[Tool, str] = {
    "deepspeed": "DeepSpeed",
    "transformers": "transformers' Trainer",
    "trl": "TRL",
    "axolotl": "axolotl",
    "llama-factory": "LLaMA-Factory",
    "accelerate": "accelerate",
}

_TRAINERS = "per_device_train_batch_size"

_MARKS: Mapping[Tool, str] = {
    "deepspeed": f"zero_optimization train_batch_size {MICRO_BATCH}",
    "accelerate": "compute_environment distributed_type deepspeed_config machine_rank",
    "axolotl": "base_model sequence_len",
    "llama-factory": "finetuning_type infer_backend export_dir",
    "trl": "use_peft packing packing_strategy completion_only_loss assistant_only_loss dataset_text_field "
    "use_bnb_nested_quant dataset_num_proc dataset_train_split dataset_test_split dataset_kwargs dataset_mixture "
    "dataset_prompt_column max_prompt_length max_completion_length num_generations reward_funcs",
    "transformers": f"{_TRAINERS} per_gpu_train_batch_size model_name_or_path parallelism_config",
}
"""Keys that only files of one tool have, asked in this order: TRL and LLaMA-Factory have Trainer's keys, too."""


@dataclass(frozen=True)
class Place:
    """The place of a value in a file. `line` counts from 1; None where it is not known."""

    path: Path
    key: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line is not None else str(self.path)


@dataclass(frozen=True)
class Document:
    """One file. `lines` has the line of each key, by its path from the top.

    `under`: a file whose values count where this one says nothing; they are in `content`, too.
    """

    path: Path
    tool: Tool
    content: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    under: "Document | None" = None

    def place(self, *keys: str) -> Place:
        """Return the place of a key, or of the innermost mapping around it that has a line."""
        line = next((self.lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), None)
        if line is None and self.under is not None:
            return self.under.place(*keys)
        return Place(self.path, ".".join(keys), line)


Level = Literal["error", "warning", "note"]

MAY_DECIDE_MEMORY = re.compile(
    r"^(?!(data(?!\w*_(max|seq)_?len)|preproc|eval|test|val|log|save|hub|wandb|swanlab|trackio|mlflow|comet|tokenizer|report)[a-z]*_)(\w+_)?("
    r"q?lora|dora|oft|vera|ia3|peft|adapt|modules|layers|rank|r$|freeze|frozen|unfr|tun(e|ing)|trainable|spectrum|"
    r"quant|double_quant|bits?(_|$)|load_in|\d+_?bit|(n?v?|mx)fp\d|int\d|gptq|awq|aqlm|hqq|eetq|bnb|qat|onebit|dtype|precision|"
    r"batch|bsz?(_|$)|negatives|passages|group_size|len|max_?len|seq|tokens?(_|$)|pack|multipack|cutoff|context|"
    r"parallel|pipeline|megatron|tensor(?!board)|shard|fsdp|zero(_|\d)|deepspeed|ds_(stage|config)|dist(_|$)|expert|moe|"
    r"[tcspe]p(_|$)|offload|cpu|"
    r"kt(_|$)|replicate|"
    r"vision|visual|image|video|audio|speech|pixel|resolution|frames|mm_|multi_?modal|tower|projector|vit(_|$)|"
    r"ref(_|$)|reference|reward|rl(_|$)|dpo|kto|grpo|ppo|pref(?!ix|etch)|teacher|distil|kd_|critic|rollout|vllm|ebft|diffusion|hatchery|"
    r"kernel|sonicmoe|scattermoe|attn|attention|flash|unsloth|liger|compile|checkpointing(?!_steps)|recompute|"
    r"galore|apollo|badam|lisa|lomo|relora|muon|asft|ema(_|$)|loss$|optim|embed|vocab|head|hidden_size|classif|num_labels|"
    r"model_(config|class|args)"
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
        given: the settings that a flag gives, which are not read.
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
    packing: bool = False
    packs_apart: bool | None = None
    tiled_loss: bool = False
    tiled_mlp: bool = False
    sequence_parallel: int = 1
    expandable_segments: bool | None = None
    deepspeed: Mapping[str, Any] | None = None
    fills_auto: bool = False
    given: Collection[str] = ()
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


def read(path: Path, tool: Tool | None = None) -> Document:
    """Read the file at `path`. `tool`: the tool it belongs to, where another file has said so.

    Raises:
        RequestError: it cannot be read, its content does not match its name, or no tool has such keys.
    """
    with failure(f"cannot read {path}", OSError), failure(f"{path} is not text", ValueError):
        text = files.without_bom(files.read_regular(path)).decode()
    is_yaml = path.suffix in (".yaml", ".yml")
    if not is_yaml and path.suffix != ".json" and tool != "deepspeed":
        return _script(path, text, tool)
    try:
        content = yaml.safe_load(text) if is_yaml else json.loads(text, object_pairs_hook=_without_duplicates)
    except RequestError as error:
        raise RequestError(f"{path}: {error.what}", because=error.because) from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "YAML" if is_yaml else "JSON"
        raise RequestError(f"{path} is not {kind}", because=" ".join(str(error).split())) from None
    refuse(
        (
            not isinstance(content, dict),
            f"{path} holds no settings",
            "it is empty" if content is None else f"it is a {type(content).__name__}, not a mapping",
            None,
        )
    )
    content = {str(key): value for key, value in content.items()}
    if tool is None and _OF_SWIFT & content.keys():
        raise _not_swift(path, "is a file of")
    return Document(path, tool or _tool_of(path, content.keys()), content, dict(_lines(text)))


_OF_SWIFT = {"tuner_type", "train_type", "rlhf_type", "split_dataset_ratio"}


def _not_swift(path: Path, is_what: str) -> RequestError:
    return RequestError(
        f"{path} {is_what} ms-swift, whose arguments frugal does not read",
        because="it has defaults of its own, and builds what it trains of names such as `tuner_type` and `zero3`",
        hint="plan the same with frugal: frugal plan --model NAME --global-batch N --seq-len N --lora r=N",
    )


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dictionary, refusing duplicates as DeepSpeed does (`dict_raise_error_on_duplicate_keys`)."""
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise RequestError(f"`{twice[0]}` is given twice", because="DeepSpeed refuses that, other tools take the last")
    return dict(pairs)


def _lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the line of each key. JSON is parsed as YAML, once tabs are replaced."""
    try:
        root = yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = (*path, str(key.value))
                yield inner, key.start_mark.line + 1
                waiting.append((inner, value))


def _tool_of(path: Path, keys: Collection[str], tools: Collection[Tool] = tuple(NAMES), why: str = "") -> Tool:
    for tool in _MARKS:
        is_open = tool in tools and (tool != "axolotl" or _TRAINERS not in keys)  # own scripts name a base_model, too
        if is_open and not set(_MARKS[tool].split()).isdisjoint(keys):
            return tool
    raise RequestError(
        f"{path} is no configuration that frugal knows",
        because=why or f"it has no key by which a file of {', '.join(NAMES.values())} is recognised",
        hint="give the file or script that starts the training; a loop of your own: frugal dryrun SCRIPT.py:step",
    )


def _script(path: Path, text: str, tool: Tool | None) -> Document:
    content, lines = parsed_script(path, text)
    program = f"/{content[PROGRAM]}"
    if program.startswith(("/swift/", "/megatron/")) or "/swift/cli/" in program:
        raise _not_swift(path, "starts")
    if tool is None and re.search(r"/trl/|/scripts/sft\w*\.py|/sft\.py", program):
        tool = "trl"
    if tool is None and content[FILES]:
        tool = "transformers"
    why = f"it starts {content[PROGRAM]}, whose flags are not those of LLaMA-Factory or transformers' Trainer"
    return Document(path, tool or _tool_of(path, content, ("llama-factory", "transformers"), why), content, lines)
