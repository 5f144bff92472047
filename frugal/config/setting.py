"""One setting: a field of a dataclass, from which its flag, its key in frugal.toml, its checks and its messages come.

    seq_len: int = setting(1024, "Maximum tokens per sample.", "model and batch", least=1, is_first=True)

The annotation is its type, `setting` describes it. `frugal.config.schema` collects all in one table. What only experts
change has no flag: it stands in a table of frugal.toml (`[optimizer]`, `[schedule]`, `[train]`), or in `--set`.

An unknown setting that another trainer has (`--per-device-train-batch-size`) is answered with ours, by `OTHER_NAMES`.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from math import inf, isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from frugal.config.learning_rate import Schedule
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
    return {"wsd": "warmup_stable_decay"}.get(name, name if name in get_args(Schedule) else "cosine")


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
    "bf16_optimizer_states": OtherName(_DEEPSPEED, "--optimizer-states bf16"),
    "bf16_master_weights_and_grads": OtherName(_DEEPSPEED, "--optimizer-states bf16"),
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
    "betas": OtherName(_TORCH, "--set optimizer.beta1=0.9 --set optimizer.beta2=0.999"),
    "eps": OtherName(_TORCH, "--set optimizer.epsilon={}"),
    "beta1": OtherName(_MANY, "--set optimizer.beta1={}"),
    "beta2": OtherName(_MANY, "--set optimizer.beta2={}"),
    "adam_beta1": OtherName(_HF, "--set optimizer.beta1={}"),
    "adam_beta2": OtherName(_HF, "--set optimizer.beta2={}"),
    "adam_epsilon": OtherName(_HF, "--set optimizer.epsilon={}"),
    "adam_eps": OtherName(_MEGATRON, "--set optimizer.epsilon={}"),
    "optimizer.beta1": OtherName(_TORCHTITAN, "--set optimizer.beta1={}"),
    "optimizer.beta2": OtherName(_TORCHTITAN, "--set optimizer.beta2={}"),
    "optimizer.eps": OtherName(_TORCHTITAN, "--set optimizer.epsilon={}"),
    "momentum": OtherName(_TORCH, "--set optimizer.momentum={}"),
    "warmup_steps": OtherName(_HF, "--warmup {}"),
    "warmup_ratio": OtherName(_HF, "--warmup {}", stand_in="5%", of_value=_percent),
    "lr_warmup_iters": OtherName(_MEGATRON, "--warmup {}"),
    "lr_warmup_fraction": OtherName(_MEGATRON, "--warmup {}", stand_in="5%", of_value=_percent),
    "min_lr": OtherName(_MANY, "--set schedule.min-lr-ratio=0.1", "it is given as a part of the peak learning rate"),
    "min_lr_rate": OtherName(_HF, "--set schedule.min-lr-ratio={}"),
    "lr_decay_iters": OtherName(_MEGATRON, "--set schedule.steps={}"),
    "metric_for_best_model": OtherName(_HF, "--best {}", stand_in="loss"),
    "greater_is_better": OtherName(_HF, "--best NAME:max"),
    "load_best_model_at_end": OtherName(_HF, "--best loss", "a run with --best ends with the weights of its best"),
    "early_stopping_patience": OtherName(_HF, "--patience {}"),
    "hub_model_id": OtherName(_HF, "--set train.push-to-hub={}", stand_in="REPO"),
    "push_to_hub": OtherName(_HF, "--set train.push-to-hub={}", stand_in="REPO"),
    "max_train_samples": OtherName(_HF, "--set train.limit={}"),
    "dataset_text_field": OtherName("TRL's", "--columns text={}", stand_in="NAME"),
    "text_column": OtherName(_HF, "--columns text={}, or source={} of pairs", stand_in="NAME"),
    "summary_column": OtherName(_HF, "--columns target={}", stand_in="NAME"),
    "label_column_name": OtherName(_HF, "--columns label={}", stand_in="NAME"),
    "reduce_bucket_size": OtherName(_DEEPSPEED, "--set reduce-bucket-elements={}"),
    "overlap_comm": OtherName(_DEEPSPEED, "--set overlap-comm=true"),
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
    """A type of values. `word_type` converts a word of a command line; of a count `thousand` is what `k` stands for."""

    word_type: type
    must_be: str
    accepts: Callable[[Any], bool]
    thousand: int | None = None


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
        refused: values that people ask for and frugal cannot provide: the reason, and what to do instead.
        default: None leaves the decision to frugal.
        shown_default: in words, where `default` does not say it.
        least: the smallest number allowed.
        most: the largest number allowed.
        table: the table of frugal.toml that has it; empty: the top.
        key: its name there, if another.
        is_flag: False: it stands in frugal.toml alone, or in `--set`.
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
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    shown_default: str | None = None
    least: int | None = None
    most: int | None = None
    table: str = ""
    key: str = ""
    is_flag: bool = True
    is_first: bool = False
    is_expert: bool = False
    short: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def path(self) -> str:
        """Its place in frugal.toml, such as `optimizer.beta2`, which `--set` also takes."""
        return ".".join(filter(None, (self.table, self.key or self.name.replace("_", "-"))))

    @property
    def flag(self) -> str:
        """Its spelling on a command line, and in messages."""
        return flag_of(self.name) if self.is_flag else self.path

    def read(self, value: Any, place: str = "") -> Any:
        """Return a value, as a number where it is a count such as `4M`. Raises as `check`."""
        if isinstance(value, str) and self.kind.thousand:
            with suppress(RequestError):  # then `check` says what it must be
                value = parse_count(value, self.kind.thousand)
        self.check(value, place)
        return value

    def check(self, value: Any, place: str = "") -> None:
        """Check the type of a value, or that it is one of the choices. `place` says where it stands.

        Raises:
            RequestError: it is not allowed.
        """
        if value is None:
            return
        self.check_refused(value, place)
        if self.choices:
            is_right, must_be = value in self.choices, f"one of {', '.join(self.choices)}"
        else:
            is_right, must_be = self.kind.accepts(value), self.kind.must_be
        if not is_right:
            raise RequestError(f"`{self.key or self.name}`{place} is {value!r}", because=f"it must be {must_be}")

    def check_refused(self, value: Any, place: str = "") -> None:
        """Refuse a value that people ask for and frugal cannot provide.

        Raises:
            RequestError: with the reason.
        """
        if isinstance(value, str) and value.lower() in self.refused:
            because, hint = self.refused[value.lower()]
            raise RequestError(f"{self.flag} {value} is impossible{place}", because=because, hint=hint)

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
