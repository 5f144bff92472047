"""Other trainers' names for what frugal calls otherwise, decides itself, or has no need of."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

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

_KEEPS_THE_BATCH = "frugal keeps the global batch, and cuts it into micro-batches for the GPUs there are"
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}


def _schedule(name: str) -> str:
    return _SCHEDULES.get(name, "cosine, linear or constant")


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
    "report_to": OtherName(_HF, "leave it out", "every step is written to metrics.jsonl in the run's folder"),
    "max_grad_norm": OtherName(_HF, "--gradient-clipping {}"),
    "lr_scheduler_type": OtherName(_HF, "--schedule {}", stand_in="cosine", of_value=_schedule),
    "optim": OtherName(_HF, "--optimizer {}", stand_in="adamw", of_value=_optimizer),
    "resume_from_checkpoint": OtherName(
        _HF, "--resume --out DIR", "a run goes on from the newest checkpoint in its folder"
    ),
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
