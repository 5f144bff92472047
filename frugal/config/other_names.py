"""Other trainers' names of settings, and frugal's former ones, answered with ours.

An unknown setting that another trainer has (`--per-device-train-batch-size`) is an error whose hint says what to write.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from frugal.errors import RequestError


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
_TORCH, _TORCHTITAN, _MEGATRON, _PLAN = "torch's", "torchtitan's", "Megatron's", "`frugal plan`'s"

_KEEPS_THE_BATCH = "frugal keeps the global batch, and cuts it into micro-batches for the GPUs there are"

_QUANTISED = (
    "quantised communication changes the numbers that are trained, and its kernels run on GPUs alone, so that no test "
    "of frugal's holds what it costs"
)


def _schedule(name: str) -> str:
    """Return our schedule for another trainer's; those that we lack are kinds of cosine, or nearest to it."""
    lacking = ("restarts", "warmup_with", "plateau", "greedy", "rex", "one_cycle", "log_sweep", "quadratic")
    nearest = "cosine" if any(word in name for word in lacking) else name
    return {"wsd": "warmup_stable_decay"}.get(name, nearest)


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
    "train_tokens": OtherName(_PLAN, "--steps N or --epochs N says how long to train"),
    "gpu_hour_price": OtherName(_PLAN, "leave it out; `frugal plan` says with it what a run costs"),
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
    "offload_optimizer": OtherName(
        _DEEPSPEED,
        "--offload {}",
        of_value=lambda device: "optimizer" if device == "cpu" else device,
        stand_in="optimizer",
    ),
    "offload_param": OtherName(_DEEPSPEED, "--offload all", "frugal offloads parameters with the optimizer's states"),
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
    "nproc_per_node": OtherName("torchrun's", "--gpus {}, with --device cpu for CPU processes"),
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
    "tune": OtherName(_FORMER, "leave it out", "in 32 of 32 unseen cases tuning kept the plan"),
    "ranks": OtherName(_FORMER, "--device cpu --gpus {} --mem 2G"),
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


def unknown_setting(name: str, value: Any, known: Iterable[str], *, place: str, command: str) -> RequestError:
    """Return the error for an unknown name, with ours if another trainer's or a similar one is meant."""
    close = get_close_matches(name, list(known), n=1)
    return answer(name, value, f"`{name}`{place}") or RequestError(
        f"unknown setting `{name}`{place}",
        hint=f"did you mean `{close[0]}`?" if close else f"see `{command} --help`",
    )
