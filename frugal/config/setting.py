"""One setting: a field of a dataclass, from which its flag, its key in frugal.toml, its checks and its messages come.

    seq_len: int = setting(1024, "Tokens in the longest sample.", "model and batch", least=1, is_first=True)

The annotation says what a value may be, `setting` what it is for. `frugal.config.schema` collects them in one table.

An unknown setting that another trainer has (`--per-device-train-batch-size`) is answered with ours, by `OTHER_NAMES`.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from math import isfinite
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from frugal.config.learning_rate import Schedule
from frugal.errors import RequestError


@dataclass(frozen=True)
class OtherName:
    """What to answer. In `hint` `{}` is the value that was given, or `stand_in` where there is none.

    Attributes:
        whose: name it is.
        hint: what to write here.
        because: why it means something else here; empty where it is the same under another name.
        stand_in: for a value, in words.
        of_value: their value in our words.
    """

    whose: str
    hint: str
    because: str = ""
    stand_in: str = "N"
    of_value: Callable[[str], str] = str


_HF, _DEEPSPEED, _MANY = "HF Trainer's", "DeepSpeed's", "other trainers'"
_TORCH, _TORCHTITAN, _MEGATRON = "torch's", "torchtitan's", "Megatron's"

_KEEPS_THE_BATCH = "frugal keeps the global batch, and cuts it into micro-batches for the GPUs there are"

_QUANTISED = (
    "quantised communication changes the numbers that are trained, and its kernels run on GPUs alone, so that no test "
    "of frugal's holds what it costs"
)


def _schedule(name: str) -> str:
    return {"wsd": "warmup_stable_decay"}.get(name, name if name in get_args(Schedule) else "cosine")


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
    "betas": OtherName(_TORCH, "--adam-beta1 0.9 --adam-beta2 0.999"),
    "eps": OtherName(_TORCH, "--adam-epsilon {}"),
    "beta1": OtherName(_MANY, "--adam-beta1 {}"),
    "beta2": OtherName(_MANY, "--adam-beta2 {}"),
    "optimizer.beta1": OtherName(_TORCHTITAN, "--adam-beta1 {}"),
    "optimizer.beta2": OtherName(_TORCHTITAN, "--adam-beta2 {}"),
    "optimizer.eps": OtherName(_TORCHTITAN, "--adam-epsilon {}"),
    "adam_eps": OtherName(_MEGATRON, "--adam-epsilon {}"),
    "warmup": OtherName(_MANY, "--warmup-steps {}, or --warmup-ratio for a part of the schedule"),
    "lr_warmup_iters": OtherName(_MEGATRON, "--warmup-steps {}"),
    "lr_warmup_fraction": OtherName(_MEGATRON, "--warmup-ratio {}"),
    "min_lr": OtherName(_MANY, "--min-lr-ratio 0.1", "it is given as a part of the peak learning rate"),
    "min_lr_rate": OtherName(_HF, "--min-lr-ratio {}"),
    "lr_decay_iters": OtherName(_MEGATRON, "--schedule-steps {}"),
    "metric_for_best_model": OtherName(_HF, "--best {}", stand_in="loss"),
    "greater_is_better": OtherName(_HF, "--best-mode max"),
    "load_best_model_at_end": OtherName(_HF, "--save-best-model"),
    "early_stopping_patience": OtherName(_HF, "--patience {}"),
    "compute_metrics": OtherName(_HF, "--metric FILE.py:NAME"),
    "resume_from_checkpoint": OtherName(
        _HF, "--resume --out DIR", "a run goes on from the newest checkpoint in its folder"
    ),
    "zero_hpz_partition_size": OtherName(_DEEPSPEED, "leave it out", "frugal has no secondary partition of parameters"),
    "zero_quantized_weights": OtherName(_DEEPSPEED, "leave it out", _QUANTISED),
    "zero_quantized_gradients": OtherName(_DEEPSPEED, "leave it out", _QUANTISED),
    "zero_quantized_nontrainable_weights": OtherName(_DEEPSPEED, "--quantize nf4, for the base under --lora"),
    "nproc_per_node": OtherName("torchrun's", "--gpus {}, or --ranks {} for CPU processes"),
    "num_gpus": OtherName(_DEEPSPEED, "--gpus {}"),
    "dataset_name": OtherName(_HF, "--data {}", stand_in="NAME"),
    "train_file": OtherName(_HF, "--data {}", stand_in="FILE"),
    "validation_file": OtherName(_HF, "--validation-data {}", stand_in="FILE"),
}


def answer(name: str, value: Any, shown: str, flags: Collection[str] = ()) -> RequestError | None:
    """What to say of a name that another trainer knows; None of any other name. `shown` is it as it was written.

    `value` is what it was given; None where that is not known. `flags` are those of the command that it was given to.
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
"""Of flags in `--help`, in the order in which they are printed."""


@dataclass(frozen=True)
class Kind:
    """What a value may be. `word_type` is what one word of a command line becomes."""

    word_type: type
    must_be: str
    accepts: Callable[[Any], bool]


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types) and not isinstance(value, bool)


def _is_paths(value: Any) -> bool:
    words = value if isinstance(value, list | tuple) else [value]
    return bool(words) and all(isinstance(word, str) for word in words)


LENGTH = Kind(int, "a whole number of tokens", _is(int))
"""On a command line `128k` is 131072, as in the names of models."""

SIZE = Kind(str, "an amount such as 12G", _is(str, int))
SIZES = Kind(str, "an amount such as 12G", _is(str, int, list, tuple))
_KINDS = {
    int: Kind(int, "a whole number", _is(int)),
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
        name: as in Python and in frugal.toml.
        help: what it is for, with its unit.
        group: where `--help` lists it.
        kind: what a value may be, unless `choices` are named.
        choices: all values there are.
        refused: values that people ask for and there are not: why, and what to do instead.
        default: None leaves it to frugal.
        shown_default: in words, where `default` does not say it.
        least: the smallest number allowed.
        most: the largest number allowed.
        is_first: one of the few that most people need; they lead `--help`.
        is_expert: only `--help-all` lists it.
        is_repeatable: a flag may be given several times.
        has_opposite: there is `--no-NAME`, too, because None is not the same as False.
        short: other spellings of its flag.
        metavar: what stands for the value in `--help`.
    """

    name: str
    help: str
    group: Group
    kind: Kind
    choices: tuple[str, ...]
    refused: Mapping[str, tuple[str, str]]
    default: Any
    shown_default: str | None
    least: int | None
    most: int | None
    is_first: bool
    is_expert: bool
    is_repeatable: bool
    has_opposite: bool
    short: tuple[str, ...]
    metavar: str | None

    @property
    def flag(self) -> str:
        """Its spelling on a command line."""
        return flag_of(self.name)

    def check(self, value: Any, place: str = "") -> None:
        """Whether it may have this value; None is the same as not given. `place` says where it stands.

        Raises:
            RequestError: it may not.
        """
        if value is None:
            return
        self.check_refused(value, place)
        if self.choices:
            is_right, must_be = value in self.choices, f"one of {', '.join(self.choices)}"
        else:
            is_right, must_be = self.kind.accepts(value), self.kind.must_be
        if not is_right:
            raise RequestError(f"`{self.name}`{place} is {value!r}", because=f"it must be {must_be}")

    def check_refused(self, value: Any, place: str = "") -> None:
        """Whether people ask for this value although there is none.

        Raises:
            RequestError: they do.
        """
        if isinstance(value, str) and value.lower() in self.refused:
            because, hint = self.refused[value.lower()]
            raise RequestError(f"{self.flag} {value} is impossible{place}", because=because, hint=hint)

    def check_size(self, value: Any, hint: str | None = None) -> None:
        """Whether a number is large enough.

        Raises:
            RequestError: it is not.
        """
        if value is None or self.least is None:
            return
        if self.kind.word_type is float and not (isfinite(value) and value >= self.least):
            raise RequestError(
                f"{self.flag} is {value:g}", because=f"it must be a finite number, at least {self.least}"
            )
        if value < self.least:
            raise RequestError(f"{self.flag} is {value}", because=f"it must be at least {self.least}", hint=hint)
        if self.most is not None and value > self.most:
            raise RequestError(f"{self.flag} is {value}", because=f"it must be at most {self.most}", hint=hint)


def setting(
    default: Any,
    help_text: str,
    group: Group,
    *,
    kind: Kind | None = None,
    shown_default: str | None = None,
    least: int | None = None,
    most: int | None = None,
    is_first: bool = False,
    is_expert: bool = False,
    short: tuple[str, ...] = (),
    metavar: str | None = None,
    refused: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> Any:
    """A dataclass field that is a setting; see `SettingRow` for what the parameters mean."""
    row = {
        "help": help_text, "group": group, "kind": kind, "shown_default": shown_default, "least": least, "most": most,
        "is_first": is_first, "is_expert": is_expert, "short": short, "metavar": metavar,
        "refused": refused,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=row)


@cache
def settings_of(owner: type) -> Mapping[str, SettingRow]:
    """The rows of a dataclass by name; its annotations say kind and choices."""
    annotations = get_type_hints(owner)
    return {
        field.name: _row(field.name, annotations[field.name], field.default, **field.metadata)
        for field in dataclasses.fields(owner)
    }


def _row(name: str, annotation: Any, default: Any, *, kind: Kind | None, **row: Any) -> SettingRow:
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
        choices=get_args(plain) if is_choice else (),
        is_repeatable=is_repeatable,
        has_opposite=plain is bool and is_optional,
        **row,
    )


def check_sizes(asked: Any, hint: str | None = None) -> None:
    """Whether all numbers of a dataclass of settings are large enough; `{flag}` in `hint` is the flag.

    Raises:
        RequestError: one is not.
    """
    for row in settings_of(asked.__class__).values():
        row.check_size(getattr(asked, row.name), None if hint is None else hint.format(flag=row.flag))


def unknown_setting(name: str, value: Any, known: Iterable[str], *, place: str, command: str) -> RequestError:
    """No setting has this name; what it is called here, if another trainer has one of it."""
    theirs = answer(name, value, f"`{name}`{place}")
    if theirs is not None:
        return theirs
    close = get_close_matches(name, list(known), n=1)
    return RequestError(
        f"unknown setting `{name}`{place}",
        hint=f"did you mean `{close[0]}`?" if close else f"see `{command} --help`",
    )


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")
