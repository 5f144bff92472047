"""transformers' Trainer under a plan: its loop, logging, callbacks and checkpoints; the plan's batch, loss and memory.

    plan = frugal.Plan.read("plan.json")
    args = training_arguments(plan, "run", max_steps=1000)  # before the model
    model = AutoModelForCausalLM.from_pretrained(...)
    PlannedTrainer(model=model, args=args, plan=plan, train_dataset=...).train()

`PlannedMixin` does the same for a trainer that derives from it: `class Planned(PlannedMixin, SFTTrainer): ...`.

What it changes of Trainer: a global batch is exact, with uneven micro-batches and without a partial one at the end of
an epoch; the loss is summed over targets and divided by those of the global batch over all ranks; samples of like
length share a micro-batch, or with `--pack` a sample, in which none attends to another; the tiled loss and every kind
of activation checkpointing of a plan work; the first steps' memory is compared with the plan. What stays Trainer's: out
of memory ends the run, `evaluate` averages over batches.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from frugal.deepspeed_adapter import export, gradients
from frugal.deepspeed_adapter.json_config import deepspeed_config
from frugal.distributed import env, process_group
from frugal.distributed.connections.listeners import closed_afterwards
from frugal.engine.oom_retry import Guard
from frugal.engine.train_step import change, refuse_other_model
from frugal.errors import PlanMismatchError, RequestError, logger, refuse
from frugal.integrations.micro_batches import Packs, PlannedBatches, PlannedSamples, collate_packs
from frugal.models import adapters, batch_norm, packs, tiled_loss
from frugal.models.losses import decoder_inputs
from frugal.models.objectives import CausalLM, summed_cross_entropy
from frugal.planning.plan import Plan
from frugal.units import IGNORED, format_bytes

__all__ = ["PlannedMixin", "PlannedTrainer", "training_arguments"]

Arguments = TypeVar("Arguments", bound=TrainingArguments)

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
    request = plan.request
    decided = _OF_THE_LOSS | {
        "max_length": request.seq_len,
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
    known = {field.name for field in fields(arguments)}
    decided = {name: value for name, value in decided.items() if name in known}
    refuse(
        *(
            (
                others[name] != decided[name],
                f"`{name}` is {others[name]!r}, and {decided[name]!r} in the plan",
                "the plan's memory and batch hold for what it says",
                "leave it out, or plan for the other value",
            )
            for name in sorted(decided.keys() & others.keys())
        )
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


class PlannedMixin:
    """A mixin before a Trainer in the bases, which trains by `plan`. Make `args` with `training_arguments`."""

    def __init__(self, *arguments: Any, plan: Plan, **others: Any) -> None:
        export.check(plan, "hf")
        model, *rest = arguments or (others.pop("model", None),)
        if not isinstance(model, nn.Module):
            raise RequestError(
                "a Trainer under a plan needs the model itself",
                because=f"`model` is {model!r}",
                hint="load it after training_arguments(), and pass it",
            )
        self.plan = plan
        model = adapters.as_planned(model, plan)
        self._decoder_inputs = _decoder_inputs(model) if plan.model.task == "seq2seq" else None
        super().__init__(*(model, *rest), **others)
        trainer: Any = self
        refuse_other_model(plan, trainer.model)
        batch_norm.apply(trainer.model, plan.request.batch_norm)
        change(trainer.model, plan.strategy)
        trainer.model.config.use_cache = False
        if plan.strategy.loss == "tiled":
            trainer.args.prediction_loss_only = True
        trainer.loss_is_scaled_for_ga = True  # `compute_loss` divides by the targets of the global batch
        trainer.add_callback(_WhileTraining(plan))

    @property
    def _is_causal(self) -> bool:
        return self.plan.model.task == "causal-lm"

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's micro-batches, which accelerate must not split again."""
        trainer: Any = self
        dataset, collate = trainer.train_dataset, trainer.data_collator
        if dataset is None or not hasattr(dataset, "__len__"):
            raise RequestError(
                "a plan's global batches are drawn from a data set of known length",
                because=f"train_dataset is {type(dataset).__name__}",
            )
        if hasattr(dataset, "column_names"):
            sampled = trainer._remove_unused_columns(dataset, description="training")
        else:
            sampled = dataset
            collate = trainer._get_collator_with_removed_columns(collate, description="training")
        args, request = trainer.args, self.plan.request
        if request.pack:
            collate = partial(collate_packs, collate, CausalLM(packed=True, document_tokens=request.document_tokens))
            dataset = sampled = Packs(sampled, request.seq_len)
        planned = PlannedSamples(sampled, collate, is_causal=self._is_causal)
        return DataLoader(
            planned,  # type: ignore[arg-type]  # has all of a data set that is used
            batch_sampler=PlannedBatches(self.plan, dataset, args.process_index, args.seed),
            collate_fn=planned.collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        )

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
        """Return the number of targets of the global batch, over all micro-steps and ranks."""
        trainer: Any = self
        own = sum((self._targets(batch["labels"]) != IGNORED).sum() for batch in batch_samples)
        return trainer.accelerator.gather(torch.as_tensor(own, device=device)).sum()

    def _targets(self, labels: Tensor) -> Tensor:
        """Return the target of each position, `(samples, positions)`."""
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED) if self._is_causal else labels

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return this micro-batch's part of the mean over the global batch's targets, times the ranks that DeepSpeed
        averages over. In an evaluation, return the mean over its own targets."""
        trainer: Any = self
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        targets = self._targets(labels)
        documents = inputs.pop(packs.OFFSETS, None), inputs.pop(packs.LONGEST, None)
        if self._decoder_inputs is not None and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = self._decoder_inputs(labels)
        with packs.documents_kept_apart(*documents) if self.plan.request.pack else nullcontext():
            if tiled_loss.is_applied(model):
                outputs = tiled_loss.outputs_with_sum(model, inputs, targets)
                total = outputs.logits
            else:
                outputs = model(**inputs)
                total = summed_cross_entropy(outputs.logits, targets)
        if num_items_in_batch is None:
            loss = total / (targets != IGNORED).sum().clamp(min=1)
        else:
            loss = total * (trainer.accelerator.num_processes / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class PlannedTrainer(PlannedMixin, Trainer):
    """A `transformers.Trainer` that trains by a plan."""


def _decoder_inputs(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the function that makes decoder inputs of labels, as the model's own loss does."""
    made = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's wrapper
    decoder_inputs.complete(made.config)
    of_labels = decoder_inputs.of_class(type(made), made.config)
    if of_labels is None:
        raise RequestError(
            f"{type(made).__name__} has no way to make decoder inputs of labels",
            hint="use `frugal train`, which begins them with the start token",
        )
    return of_labels


class _WhileTraining(TrainerCallback):
    """A callback that keeps gradients of earlier steps out of a step that does not use all parameters.

    Parameters that ranks use differently are refused: Trainer cannot run a global batch again. It also compares the
    first two steps' peak with the plan on a GPU, whose allocator counts it at no cost.
    """

    def __init__(self, plan: Plan) -> None:
        self._planned_bytes = plan.memory.live_bytes

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **others: Any
    ) -> None:
        deepspeeds = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        gradients.mend(deepspeeds, model)
        gradients.announce(deepspeeds, model)
        is_nccl = dist.get_backend() == "nccl"
        with closed_afterwards():
            votes = dist.new_group(backend="gloo") if is_nccl else None
        self._guard = Guard(votes)
        self._guard.watch("use frugal train, or --zero-stage 0: Trainer cannot run a global batch again in one order")
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if args.device.type == "cuda" and state.global_step == 2 and args.process_index == 0:
            peak = torch.cuda.max_memory_allocated(args.device)
            logger.info(
                "memory: planned %s of live tensors, measured %s in the first two steps",
                format_bytes(self._planned_bytes), format_bytes(peak),
            )  # fmt: skip

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._guard.watching = False
        self._guard.vote.close()
