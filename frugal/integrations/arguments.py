"""A plan as `transformers.TrainingArguments`, or as those of a trainer that derives from Trainer."""

from dataclasses import fields
from typing import Any, TypeVar

from transformers import TrainingArguments

from frugal.deepspeed_adapter import export
from frugal.deepspeed_adapter.json_config import deepspeed_config
from frugal.distributed import env, process_group
from frugal.errors import PlanMismatchError, RequestError
from frugal.planning.plan import Plan

Arguments = TypeVar("Arguments", bound=TrainingArguments)


def training_arguments(
    plan: Plan, output_dir: str, arguments: type[Arguments] = TrainingArguments, **others: Any
) -> Arguments:
    """Return arguments with what the plan decides, and `others`, such as steps, saving and logging. Collective.

    Make it before the model: under ZeRO-3 `from_pretrained` then loads straight into the ranks' partitions.
    `arguments` is the class, such as `trl.SFTConfig`.

    Raises:
        RequestError: a Trainer cannot do what the plan says, or `others` say something that the plan decides.
        PlanMismatchError: the plan is for another number of ranks.
    """
    export.check(plan, "hf")
    known = {field.name for field in fields(arguments)}
    decided = {name: value for name, value in (_decided(plan) | _OF_THE_LOSS).items() if name in known}
    if "max_length" in known:
        decided["max_length"] = plan.request.seq_len
    for name in sorted(decided.keys() & others.keys()):
        if others[name] != decided[name]:
            raise RequestError(
                f"`{name}` is {others[name]!r}, and {decided[name]!r} in the plan",
                because="the plan's memory and batch hold for what it says",
                hint="leave it out, or plan for the other value",
            )
    env.adopt_launcher_variables()
    env.adopt_segments(plan.cluster, plan.strategy.expandable_segments)
    process_group.form()  # TrainingArguments leaves that out on CPUs, and ZeRO-3 needs it while a model is made
    made = arguments(output_dir=output_dir, **(decided | others))
    if made.world_size != plan.batch.world_size:
        raise PlanMismatchError(
            f"the plan is for {plan.batch.world_size} ranks, this run has {made.world_size}",
            hint=f"plan again for {made.world_size} GPUs, or start {plan.batch.world_size} processes",
        )
    return made


_OF_THE_LOSS = {
    "label_smoothing_factor": 0.0,
    "use_liger_kernel": False,
    "loss_type": "nll",
    "router_aux_loss_coef": 0.0,
    "packing": False,
    "padding_free": False,
    "activation_offloading": False,
}
"""Settings of Trainer and TRL's SFTTrainer that name another loss, or other memory, than is planned and computed."""


def _decided(plan: Plan) -> dict[str, Any]:
    request = plan.request
    return {
        "deepspeed": deepspeed_config(plan),
        "per_device_train_batch_size": plan.batch.largest_micro_batch,
        "gradient_accumulation_steps": plan.batch.accumulation_steps,
        "average_tokens_across_devices": True,
        "gradient_checkpointing": False,  # the plan's own kind is applied to the model
        "bf16": request.precision == "bf16",
        "fp16": request.precision == "fp16",
        "use_cpu": plan.cluster.devices[0].kind == "cpu",
        "learning_rate": request.scaled_learning_rate,
        "weight_decay": request.weight_decay,
        "adam_beta1": request.optimizer.beta1,
        "adam_beta2": request.optimizer.beta2,
        "adam_epsilon": request.optimizer.epsilon,
        "max_grad_norm": request.gradient_clipping,
    }
