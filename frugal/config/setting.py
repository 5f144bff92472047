"""One setting: a field of a dataclass, from which its flag, its key in frugal.toml, its checks and its messages come.

    seq_len: int = setting(1024, "Maximum tokens per sample.", "model and batch", least=1, is_first=True)

The annotation is its type, `setting` describes it. `frugal.config.schema` collects all in one table. What only experts
change has no flag: it is a key of a table (`frugal.config.key_table`), or stands in frugal.toml, or in `--set`.

An unknown setting that another trainer has (`--per-device-train-batch-size`) is answered with ours, by `OTHER_NAMES`.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from functools import cache
from math import inf, isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from frugal.config.key_table import KeyTable
from frugal.config.learning_rate import ScheduleName
from frugal.errors import RequestError
from frugal.units import parse_count


@dataclass(frozen=True)
class OtherName:
    """The answer to another trainer's name. In `hint` `{}` is the value given, or `stand_in` where there is none.

    Attributes:
        whose: name it is.
        hint: what to write here.
        because: why it means something else here; empty where it is the same under another name.
        stand_in: an example of a value.
        of_value: converts their value to ours.
    """

    whose: str
    hint: str
    because: str = ""
    stand_in: str = "N"
    of_value: Callable[[str], str] = str


_HF, _DEEPSPEED, _MANY, _FORMER = "HF Trainer's", "DeepSpeed's", "other trainers'", "frugal's former"
_TORCH, _TORCHTITAN, _MEGATRON = "torch's", "torchtitan's", "Megatron's"

_KEEPS_THE_BATCH = "frugal keeps the global batch, and cuts it into micro-batches for the GPUs there are"

_QUANTISED = (
    "quantised communication changes the numbers that are trained, and its kernels run on GPUs alone, so that no test "
    "of frugal's holds what it costs"
)


def _schedule(name: str) -> str:
    return {"wsd": "warmup_stable_decay"}.get(name, name if name in get_args(ScheduleName) else "cosine")


def _percent(ratio: str) -> str:
    try:
        return f"{100 * float(ratio):g}%"
    except ValueError:
        return "5%"


def _optimizer(name: str) -> str:
    if "8bit" in name or name == "adafactor":  # for memory, too
        return "adamw-8bit"
    return "sgd" if name.startswith("sgd") else "adamw"


OTHER_NAMES = {
    "batch_size": OtherName(
        _MANY, "--global-batch N is what you want kept; --micro-batch {} pins the per-GPU size", _KEEPS_THE_BATCH
    ),
    "per_device_train_batch_size": OtherName(
        _HF, "--global-batch N is what you want kept; --micro-batch {} pins the per-GPU size", _KEEPS_THE_BATCH
    ),
    "train_batch_size": OtherName(_DEEPSPEED, "--global-batch {}"),
    "train_micro_batch_size": OtherName(
        _DEEPSPEED, "--global-batch N is what you want kept; --micro-batch {} pins the per-GPU size", _KEEPS_THE_BATCH
    ),
    "per_device_eval_batch_size": OtherName(
        _HF, "leave it out", "an evaluation takes the micro-batches that were planned for training"
    ),
    "gradient_accumulation_steps": OtherName(
        _HF, "--global-batch N is what you want kept; --accumulation-steps {} pins the micro-steps", _KEEPS_THE_BATCH
    ),
    "gradient_checkpointing": OtherName(
        _HF,
        "leave it out, or pin it: --activation-checkpointing full",
        "frugal switches activation checkpointing on where it is needed or pays",
    ),
    "deepspeed": OtherName(
        _HF,
        "`frugal plan -o DIR` writes DIR/ds_config.json; --zero-stage and --offload pin parts of it",
        "frugal writes DeepSpeed's JSON itself, from a plan that was checked against the memory there is",
    ),
    "bf16": OtherName(_HF, "--precision bf16"),
    "bf16_optimizer_states": OtherName(_DEEPSPEED, "--optimizer adamw,states=bf16"),
    "bf16_master_weights_and_grads": OtherName(_DEEPSPEED, "--optimizer adamw,states=bf16"),
    "fp16": OtherName(_HF, "--precision fp16"),
    "output_dir": OtherName(_HF, "--out {}", stand_in="DIR"),
    "num_train_epochs": OtherName(_HF, "--epochs {}"),
    "max_steps": OtherName(_HF, "--steps {}"),
    "max_seq_length": OtherName(_HF, "--seq-len {}"),
    "max_length": OtherName(_HF, "--seq-len {}"),
    "block_size": OtherName(_HF, "--seq-len {}"),
    "model_name_or_path": OtherName(_HF, "--model {}", stand_in="NAME"),
    "save_steps": OtherName(_HF, "--save-every {}"),
    "save_total_limit": OtherName(_HF, "--keep {}"),
    "eval_steps": OtherName(_HF, "--eval-every {}"),
    "logging_steps": OtherName(_HF, "leave it out", "every step is written to metrics.jsonl in the run's folder"),
    "lora_r": OtherName("peft's", "--lora r={}"),
    "lora_rank": OtherName(_MANY, "--lora r={}"),
    "lora_alpha": OtherName("peft's", "--lora r=N,alpha={}"),
    "lora_dropout": OtherName("peft's", "--lora r=N,dropout={}"),
    "lora_target_modules": OtherName("TRL's", "--lora r=N,targets={}", stand_in="NAME,NAME"),
    "use_peft": OtherName("TRL's", "--lora r=16"),
    "report_to": OtherName(_HF, "--track {}", stand_in="tensorboard"),
    "max_grad_norm": OtherName(_HF, "--gradient-clipping {}"),
    "lr_scheduler_type": OtherName(_HF, "--schedule {}", stand_in="cosine", of_value=_schedule),
    "optim": OtherName(_HF, "--optimizer {}", stand_in="adamw", of_value=_optimizer),
    "betas": OtherName(_TORCH, "--optimizer adamw,beta1=0.9,beta2=0.999"),
    "eps": OtherName(_TORCH, "--optimizer adamw,epsilon={}"),
    "beta1": OtherName(_MANY, "--optimizer adamw,beta1={}"),
    "beta2": OtherName(_MANY, "--optimizer adamw,beta2={}"),
    "adam_beta1": OtherName(_HF, "--optimizer adamw,beta1={}"),
    "adam_beta2": OtherName(_HF, "--optimizer adamw,beta2={}"),
    "adam_epsilon": OtherName(_HF, "--optimizer adamw,epsilon={}"),
    "adam_eps": OtherName(_MEGATRON, "--optimizer adamw,epsilon={}"),
    "optimizer.beta1": OtherName(_TORCHTITAN, "--optimizer adamw,beta1={}"),
    "optimizer.beta2": OtherName(_TORCHTITAN, "--optimizer adamw,beta2={}"),
    "optimizer.eps": OtherName(_TORCHTITAN, "--optimizer adamw,epsilon={}"),
    "momentum": OtherName(_TORCH, "--optimizer sgd,momentum={}"),
    "warmup_steps": OtherName(_HF, "--warmup {}"),
    "warmup_ratio": OtherName(_HF, "--warmup {}", stand_in="5%", of_value=_percent),
    "lr_warmup_iters": OtherName(_MEGATRON, "--warmup {}"),
    "lr_warmup_fraction": OtherName(_MEGATRON, "--warmup {}", stand_in="5%", of_value=_percent),
    "min_lr": OtherName(_MANY, "--schedule cosine,min-lr-ratio=0.1", "it is given as a part of the peak learning rate"),
    "min_lr_rate": OtherName(_HF, "--schedule cosine,min-lr-ratio={}"),
    "lr_decay_iters": OtherName(_MEGATRON, "--schedule cosine,steps={}"),
    "metric_for_best_model": OtherName(_HF, "--best {}", stand_in="loss"),
    "greater_is_better": OtherName(_HF, "--best NAME:max"),
    "load_best_model_at_end": OtherName(_HF, "--best loss", "a run with --best ends with the weights of its best"),
    "early_stopping_patience": OtherName(_HF, "--patience {}"),
    "hub_model_id": OtherName(_HF, "leave it out, and upload the run's model: hf upload {} DIR/model", stand_in="REPO"),
    "push_to_hub": OtherName(_HF, "leave it out, and upload the run's model: hf upload {} DIR/model", stand_in="REPO"),
    "max_train_samples": OtherName(_HF, "--set train.limit={}"),
    "dataset_text_field": OtherName("TRL's", "--columns text={}", stand_in="NAME"),
    "text_column": OtherName(_HF, "--columns text={}, or source={} of pairs", stand_in="NAME"),
    "summary_column": OtherName(_HF, "--columns target={}", stand_in="NAME"),
    "label_column_name": OtherName(_HF, "--columns label={}", stand_in="NAME"),
    "reduce_bucket_size": OtherName(_DEEPSPEED, "leave it out", "frugal plans the size of DeepSpeed's gradient bucket"),
    "overlap_comm": OtherName(
        _DEEPSPEED, "leave it out", "what overlapped communication holds back on a GPU is not known, so none is planned"
    ),
    "compute_metrics": OtherName(_HF, "--metric FILE.py:NAME"),
    "resume_from_checkpoint": OtherName(
        _HF, "--resume --out DIR", "a run resumes from the newest checkpoint in its folder"
    ),
    "zero_hpz_partition_size": OtherName(_DEEPSPEED, "leave it out", "frugal has no secondary partition of parameters"),
    "zero_quantized_weights": OtherName(_DEEPSPEED, "leave it out", _QUANTISED),
    "zero_quantized_gradients": OtherName(_DEEPSPEED, "leave it out", _QUANTISED),
    "zero_quantized_nontrainable_weights": OtherName(_DEEPSPEED, "--quantize nf4, for the base under --lora"),
    "nproc_per_node": OtherName("torchrun's", "--gpus {}, or --ranks {} for CPU processes"),
    "num_gpus": OtherName(_DEEPSPEED, "--gpus {}"),
    "expandable_segments": OtherName(
        _FORMER,
        "PYTORCH_ALLOC_CONF=expandable_segments:{} in the environment, which plans follow",
        stand_in="True",
        of_value=str.capitalize,
    ),
    "no_expandable_segments": OtherName(
        _FORMER, "PYTORCH_ALLOC_CONF=expandable_segments:False in the environment, which plans follow"
    ),
    "optimizer_states": OtherName(_FORMER, "--optimizer adamw,states={}", stand_in="bf16"),
    "states": OtherName(_FORMER, "--optimizer adamw,states={}", stand_in="bf16"),
    "optimizer_implementation": OtherName(_FORMER, "--optimizer adamw,implementation={}", stand_in="fused"),
    "decay_norms": OtherName(_FORMER, "--optimizer adamw,decay-norms={}", stand_in="false"),
    "reference_batch": OtherName(_FORMER, "--optimizer adamw,reference-batch={},lr-rule=sqrt"),
    "lr_rule": OtherName(_FORMER, "--optimizer adamw,reference-batch=N,lr-rule={}", stand_in="sqrt"),
    "gradient_accumulation_dtype": OtherName(
        _FORMER, "--optimizer adamw,gradient-accumulation-dtype={}", stand_in="bf16"
    ),
    "min_lr_ratio": OtherName(_FORMER, "--schedule cosine,min-lr-ratio={}", stand_in="0.1"),
    "decay_ratio": OtherName(_FORMER, "--schedule warmup_stable_decay,decay-ratio={}", stand_in="0.1"),
    "schedule_power": OtherName(_FORMER, "--schedule polynomial,power={}"),
    "schedule_steps": OtherName(_FORMER, "--schedule cosine,steps={}"),
    "nvme_path": OtherName(_FORMER, "--offload nvme:{}", stand_in="DIR"),
    "held": OtherName(_FORMER, "--mem 24G-{}, of 24G in all", stand_in="2G"),
    "host_disk": OtherName(_FORMER, "a hostfile, with a line `NAME slots=GPUS # disk={}`", stand_in="500G"),
    "calibration": OtherName(
        _FORMER,
        "XDG_CONFIG_HOME=DIR in the environment names a folder without one",
        "a calibration of these devices is always used",
    ),
    "reduce_bucket_elements": OtherName(
        _FORMER, "leave it out", "frugal plans the size of DeepSpeed's gradient bucket"
    ),
    "document_tokens": OtherName(_FORMER, "leave it out, and name the --data", "it is that of the data"),
    "even": OtherName(
        _FORMER, "leave it out", "`frugal export` plans equal micro-batches for the targets that need them"
    ),
    "validation_fraction": OtherName(_FORMER, "--validation-data {}", stand_in="5%", of_value=_percent),
    "ssh_port": OtherName(_FORMER, "`Port {}` in ~/.ssh/config", because="ssh's own configuration says it"),
    "nic": OtherName(_FORMER, "GLOO_SOCKET_IFNAME={} NCCL_SOCKET_IFNAME={} in the environment", stand_in="eth0"),
    "best_mode": OtherName(_FORMER, "--best NAME:{}", stand_in="max"),
    "save_best_model": OtherName(_FORMER, "--best loss", "a run with --best ends with the weights of its best"),
    "label_column": OtherName(_FORMER, "--columns label={}", stand_in="NAME"),
    "source_column": OtherName(_FORMER, "--columns source={}", stand_in="NAME"),
    "target_column": OtherName(_FORMER, "--columns target={}", stand_in="NAME"),
    "layer_modes": OtherName(_FORMER, "--activation-checkpointing {}", stand_in="full:0-19,off:20-31"),
    "offload_ratio": OtherName(_FORMER, "--offload optimizer:{}", stand_in="0.5"),
    "max_samples_per_gpu": OtherName(_FORMER, "--micro-batch {}"),
    "secondary_partition": OtherName(_FORMER, "leave it out", "frugal has no secondary partition of parameters"),
    "calibrate": OtherName(_FORMER, "leave it out", "only `frugal measure --calibrate` measures a machine"),
    "frontier": OtherName(_FORMER, "leave it out", "`frugal explain --what-if` shows what other settings come to"),
    "dataset_name": OtherName(_HF, "--data {}", stand_in="NAME"),
    "train_file": OtherName(_HF, "--data {}", stand_in="FILE"),
    "validation_file": OtherName(_HF, "--validation-data {}", stand_in="FILE"),
}


def answer(name: str, value: Any, shown: str, flags: Collection[str] = ()) -> RequestError | None:
    """Return the answer to a name that another trainer knows; None for any other name.

    `shown` is the name as it was written, `value` what it was given, if known, and `flags` are the command's.
    """
    other = OTHER_NAMES.get(name.replace("-", "_"))
    if other is None:
        return None
    word = other.stand_in if value is None or isinstance(value, bool) else other.of_value(str(value))
    hint = other.hint.replace("{}", word)
    ours = hint.split()[0]
    if flags and ours.startswith("--") and ours not in flags:
        hint += ", which `frugal train` has"
    return RequestError(f"{shown} is {other.whose} name", because=other.because or (), hint=hint)


Group = Literal["model and batch", "hardware", "optimizer", "data", "run", "memory and speed", "launch"]
"""Sections of `--help`, in their order."""


@dataclass(frozen=True)
class Kind:
    """A type of values. `word_type` converts a word of a command line; of a count `thousand` is what `k` stands for.

    With `table` the value is one of several keys.
    """

    word_type: type
    must_be: str
    accepts: Callable[[Any], bool]
    thousand: int | None = None
    table: KeyTable | None = None

    @classmethod
    def of(cls, table: KeyTable) -> "Kind":
        """Return the kind of a table's values."""
        must_be = f"text such as {table.example} or a table of these"
        return cls(str, must_be, lambda value: isinstance(value, str | Mapping) or is_dataclass(value), table=table)


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types) and not isinstance(value, bool)


def _is_paths(value: Any) -> bool:
    words = value if isinstance(value, list | tuple) else [value]
    return bool(words) and all(isinstance(word, str) for word in words)


LENGTH = Kind(int, "a whole number of tokens", _is(int), thousand=1024)
"""`128k` is 131072, as in the names of models."""

SIZE = Kind(str, "an amount such as 12G", _is(str, int))
SIZES = Kind(str, "an amount such as 12G", _is(str, int, list, tuple))
_KINDS = {
    int: Kind(int, "a whole number", _is(int), thousand=1000),
    float: Kind(float, "a number", _is(int, float)),
    bool: Kind(bool, "true or false", lambda value: isinstance(value, bool)),
    str: Kind(str, "text", _is(str)),
    Path: Kind(Path, "text", _is(str, Path)),
    tuple: Kind(str, "a path or a list of paths", _is_paths),
}


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """A row of the table.

    Attributes:
        name: as in Python.
        help: one sentence with the unit.
        group: section of `--help`.
        kind: values that are allowed, unless there are `choices`.
        choices: all allowed values.
        default: None leaves the decision to frugal.
        shown_default: in words, where `default` does not say it.
        least: the smallest number allowed.
        most: the largest number allowed.
        is_flag: False: it stands in `[train]` of frugal.toml alone, or in `--set`.
        is_first: one of the few that most people need; they lead `--help`.
        is_expert: listed by `--help-all` only.
        is_repeatable: its flag may be given several times.
        has_opposite: there is also `--no-NAME`, because None differs from False.
        short: other spellings of its flag.
        metavar: stands for the value in `--help`.
    """

    name: str
    help: str
    group: Group
    kind: Kind
    choices: tuple[str, ...]
    default: Any
    is_repeatable: bool
    has_opposite: bool
    shown_default: str | None = None
    least: int | None = None
    most: int | None = None
    is_flag: bool = True
    is_first: bool = False
    is_expert: bool = False
    short: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def flag(self) -> str:
        """Its spelling on a command line, and in messages: of one without a flag the key of `--set`."""
        return flag_of(self.name).replace("--", "--" if self.is_flag else "train.", 1)

    def read(self, value: Any, place: str = "") -> Any:
        """Return a value, as a number where it is a count such as `4M`, and the keys of a table.

        Raises:
            RequestError: it is of a wrong type, or none of the choices, or a key is; `place` says where it stands.
        """
        if isinstance(value, str) and self.kind.thousand:
            with suppress(RequestError):  # then it is no number
                value = parse_count(value, self.kind.thousand)
        if self.choices:
            is_right, must_be = value in self.choices, f"one of {', '.join(self.choices)}"
        else:
            is_right, must_be = self.kind.accepts(value), self.kind.must_be
        if not (is_right or value is None):
            raise RequestError(f"`{self.name}`{place} is {value!r}", because=f"it must be {must_be}")
        table = self.kind.table
        if table is None or value is None:
            return value
        for key in value if isinstance(value, Mapping) else ():
            theirs = None if table.has(key) else answer(key, value[key], f"`{key}` of {table.flag}{place}")
            if theirs is not None:
                raise theirs
        try:
            return table.read(value)
        except RequestError as error:
            raise RequestError(f"{error.what}{place}", because=error.because, hint=error.hint) from None

    def check_size(self, value: Any, hint: str | None = None) -> None:
        """Check that a number is finite and within its bounds.

        Raises:
            RequestError: it is not.
        """
        if value is None or self.least is None:
            return
        if not (isfinite(value) and self.least <= value <= (inf if self.most is None else self.most)):
            is_float = self.kind.word_type is float
            bound = f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            raise RequestError(
                f"{self.flag} is {f'{value:g}' if is_float else value}",
                because=f"it must be {'a finite number, ' if is_float else ''}{bound}",
                hint=None if is_float else hint,
            )


def setting(default: Any, help_text: str, group: Group, **row: Any) -> Any:
    """Return a dataclass field that is a setting; `row` are other attributes of its `SettingRow`."""
    return dataclasses.field(default=default, metadata={"help": help_text, "group": group, **row})


@cache
def settings_of(owner: type) -> Mapping[str, SettingRow]:
    """Return the rows of a dataclass by name; its annotations say kind and choices. Other fields are no settings."""
    annotations = get_type_hints(owner)
    return {
        each.name: _row(each.name, annotations[each.name], each.default, **each.metadata)
        for each in dataclasses.fields(owner)
        if each.metadata
    }


def _row(name: str, annotation: Any, default: Any, *, kind: Kind | None = None, **row: Any) -> SettingRow:
    plain, is_optional = annotation, False
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not NoneType]
        is_optional = len(parts) < len(get_args(annotation))
        plain = parts[0]
    is_choice, is_repeatable = get_origin(plain) is Literal, get_origin(plain) is tuple
    return SettingRow(
        name=name,
        default=default,
        kind=kind or _KINDS[str if is_choice else tuple if is_repeatable else plain],
        choices=get_args(plain) if is_choice and kind is None else (),
        is_repeatable=is_repeatable,
        has_opposite=plain is bool and is_optional,
        **row,
    )


def check_sizes(asked: Any, hint: str | None = None) -> None:
    """Check the bounds of all numbers of a dataclass of settings; `{flag}` in `hint` is the flag.

    Raises:
        RequestError: one is out of bounds.
    """
    for row in settings_of(asked.__class__).values():
        row.check_size(getattr(asked, row.name), None if hint is None else hint.format(flag=row.flag))


def merged(rows: Mapping[str, SettingRow], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of all layers: later ones win, in a table key by key. None is the same as not given.

    Raises:
        RequestError: the keys of a table are wrong.
    """
    result: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if value is None:
                continue
            if name in rows and rows[name].kind.table is not None:
                value = rows[name].read(value)
            before = result.get(name)
            result[name] = before | value if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def unknown_setting(name: str, value: Any, known: Iterable[str], *, place: str, command: str) -> RequestError:
    """Return the error for an unknown name, with ours if another trainer's or a similar one is meant."""
    theirs = answer(name, value, f"`{name}`{place}")
    if theirs is not None:
        return theirs
    close = get_close_matches(name, list(known), n=1)
    return RequestError(
        f"unknown setting `{name}`{place}",
        hint=f"did you mean `{close[0]}`?" if close else f"see `{command} --help`",
    )


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")
