"""The engine: a model under a plan, with all that can be done to it."""

import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from frugal.checkpoint import loading, saving
from frugal.checkpoint.progress import Progress, check_plain
from frugal.data.given_batch import Given, as_samples
from frugal.deepspeed_adapter import engine
from frugal.distributed import env, process_group
from frugal.distributed.connections.listeners import closed_afterwards
from frugal.distributed.exchange import gather
from frugal.engine.evaluation import Evaluation
from frugal.engine.extensions.callbacks import Callbacks
from frugal.engine.extensions.metric import Metric
from frugal.engine.extensions.optimizer import MakeOptimizer, OwnOptimizer, ParameterGroups
from frugal.engine.train_step import Prepared, Stepper, StepResult, evaluate, wrap
from frugal.errors import PlanMismatchError, logger
from frugal.models import adapters, batch_norm
from frugal.models.loading import quantised
from frugal.models.objectives import Objective
from frugal.models.sequence_parallel import parts_of
from frugal.models.trials import model_check
from frugal.planning.plan import Plan


class Engine(Stepper):
    """A model under a plan. Make it with `initialize`."""

    def train_step(self, batch: Given | Prepared) -> StepResult:
        """Take one optimizer step on a global batch; see `frugal.engine.train_step.Stepper.train_step`."""
        result = super().train_step(batch)
        self.callbacks.call("on_step", self, self.deepspeed.global_steps, result)
        return result

    def evaluate(self, samples: Given, metric: Metric | Callable[..., Any] | None = None) -> Evaluation:
        """Return the mean loss on `samples`, the same on every rank; see `frugal.engine.train_step.evaluate`.

        `metric(predictions, labels)` gets a NumPy array for each sample, once, on rank 0, and returns a number or
        numbers by name, which are `Evaluation.metrics` on all ranks; see `frugal.engine.extensions.metric`.
        """
        if metric is not None and not isinstance(metric, Metric):
            metric = Metric.of(metric)
        evaluation = evaluate(self, as_samples(samples, self.objective), metric)
        self.callbacks.call("on_evaluation", self, self.deepspeed.global_steps, evaluation)
        return evaluation

    def save(self, folder: str | Path, progress: Progress | None = None, *, keep: int = 2, extra: Any = None) -> Path:
        """Write a checkpoint into `folder`, atomically; see `frugal.checkpoint.saving.Saver`.

        `extra`: state of your own, which `load` gives back as `Progress.extra` on all ranks. Rank 0's is saved. It must
        be plain data, which is read without running code: numbers, text, bytes, tensors, lists, tuples, dicts.

        Raises:
            RequestError: `extra` is not plain data.
            CheckpointError: a rank could not write; what was there is untouched.
        """
        check_plain(extra)
        progress = progress or Progress(step=self.deepspeed.global_steps)
        return saving.save(self, Path(folder), progress if extra is None else replace(progress, extra=extra), keep=keep)

    def load(self, folder: str | Path) -> Progress:
        """Continue from the newest good checkpoint in `folder`; see `frugal.checkpoint.loading.load`."""
        return loading.load(self, Path(folder)).progress

    def destroy(self) -> None:
        """Free the engine's hooks and buffers, so that another can follow in this process."""
        self.unused.close()
        engine.destroy(self.zero)
        self.guard.vote.close()


def initialize(
    model: nn.Module,
    plan: Plan,
    objective: Objective,
    *,
    learning_rate_schedule: Callable[[int], float] | None = None,
    callbacks: Callbacks | Sequence[Any] = (),
    optimizer: MakeOptimizer | None = None,
    parameter_groups: ParameterGroups | None = None,
    is_tried: bool = False,
) -> Engine:
    """Make the engine that trains `model` as `plan` says. Collective: every rank calls it.

    Rank 0's weights are used on all ranks. Adapters that are planned are added, unless `model` has some; what is then
    trained is `engine.module`. `learning_rate_schedule` maps the number of optimizer steps done to a
    factor on the planned learning rate. `callbacks` are objects with any of the methods `on_step`, `on_evaluation` and
    `on_save`; see `frugal.engine.extensions.callbacks`. `optimizer` makes an optimizer of a list of parameter groups,
    in place of the planned one, whose settings it does not take; `parameter_groups` are settings by a pattern of names,
    or by a function of name and parameter. The schedule is a factor on the `lr` of each group. See
    `frugal.engine.extensions.optimizer`. `is_tried`: what the gradient of `objective` depends on is known already.

    Raises:
        PlanMismatchError: the plan is for another number of ranks, or ranks hold different plans; or `optimizer` needs
            more memory than the plan leaves.
        RequestError: the device cannot do the precision, or the model what the plan says of BatchNorm; its optimizer's
            library, a compiler or the disk is missing; or DeepSpeed is another than the one that was tested, and lacks
            something.
    """
    env.adopt_segments(plan.cluster, plan.strategy.expandable_segments)
    process_group.form()
    if dist.get_world_size() != plan.batch.world_size:
        raise PlanMismatchError(
            f"the plan is for {plan.batch.world_size} ranks, this run has {dist.get_world_size()}",
            hint=f"plan again for {dist.get_world_size()} GPUs, or start {plan.batch.world_size} processes",
        )
    if (is_nccl := dist.get_backend() == "nccl") and dist.get_world_size() == 1:
        logger.warning(
            "NCCL takes 0.2 to 0.9 GiB that a plan for one GPU does not count: leave the process group to "
            "frugal.initialize"
        )
    with closed_afterwards():
        votes = dist.new_group(backend="gloo") if is_nccl else None
    held = gather((plan.digest, socket.gethostname()), tuple[str, str], votes)
    if different := {rank: host for rank, (digest, host) in enumerate(held) if digest != held[0][0]}:
        where = ", ".join(f"rank {rank} on {host}" for rank, host in different.items())
        raise PlanMismatchError(
            "the ranks were given different plans",
            because=f"another plan.json than that of rank 0 on {held[0][1]}: {where}",
            hint="give every node the same plan.json",
        )
    model = adapters.as_planned(quantised.as_planned(model, plan), plan)
    batch_norm.apply_planned(model, plan)
    if not is_tried:
        model_check.say_of_objective(model, objective, plan, dist.get_rank())
    model.zero_grad()  # of what its user tried before, or of a closure in the copy that was tried
    own = OwnOptimizer.of(model, plan, optimizer, parameter_groups)
    with nullcontext() if is_nccl else closed_afterwards():
        zero = wrap(
            model, plan.request, plan.strategy, plan.batch, learning_rate_schedule=learning_rate_schedule, votes=votes,
            make_optimizer=None if own is None else own.make, groups=None if own is None else own.groups,
        )  # fmt: skip
    part = parts_of(objective, plan.strategy.sequence_parallel, dist.get_rank())
    callbacks = callbacks if isinstance(callbacks, Callbacks) else Callbacks(callbacks)
    return Engine(zero, plan, part, votes, own_optimizer=own, callbacks=callbacks)
