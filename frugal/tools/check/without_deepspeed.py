"""The memory of a run without DeepSpeed: a dry run of transformers' Trainer itself, on a card that is pretended to it.
axolotl, TRL and LLaMA-Factory are made of it.

Under DDP each GPU does what one does alone, and keeps buckets of the gradients' size beside them. Left out: DDP's own
cut of the buckets, which changes what is reserved and not what is allocated.
"""

import io
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any

from frugal import temporary
from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Precision, Request
from frugal.dryrun.client import DryRunSource
from frugal.dryrun.messages import DryRun
from frugal.dryrun.pool import Pool
from frugal.planning.strategy import Strategy
from frugal.planning.what_if import with_gpus
from frugal.tools.check.document import Settings


def weights_of(settings: Settings) -> Precision | None:
    """Return the type in which the weights are loaded that are trained; None where only the script knows it.

    `same` and `auto` are the run's own precision: axolotl loads it, and it is what models are published in.
    """
    dtypes: dict[str, Precision | None] = {
        "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "same": settings.precision,
        "auto": settings.precision, "None": "fp32" if settings.precision == "fp32" else None,
    }  # fmt: skip
    return dtypes.get(str(settings.raw.get("dtype")).removeprefix("torch."))


class TrainerSource(DryRunSource):
    """A source whose stage 0 is Trainer without DeepSpeed."""

    def __init__(self, request: Request, cluster: Cluster, settings: Settings, pool: Pool | None) -> None:
        self._settings = settings
        super().__init__(request, cluster, pool=pool)

    def _key(self) -> list[object]:
        """Return what a dry run depends on, and that these are not DeepSpeed's."""
        return [
            *super()._key(), "Trainer", weights_of(self._settings), self._settings.raw.get("optim"),
            self._settings.use_reentrant, self.request.seq_len, self.request.gradient_clipping,
        ]  # fmt: skip

    def dry_runs(self, strategy: Strategy, micro_batch: int, accumulation_steps: int) -> list[DryRun]:
        """Return the dry run of one rank at stage 0, of two optimizer steps; all ranks are alike. Otherwise, and
        raises, as DeepSpeed's."""
        if strategy.zero_stage:
            return super().dry_runs(strategy, micro_batch, accumulation_steps)
        from transformers import Trainer, TrainingArguments  # which takes seconds, as all that needs torch

        from frugal.deepspeed_adapter.kernels import DTYPES
        from frugal.engine.train_step import change
        from frugal.models.resolve import resolve_request
        from frugal.tools.own_loop.run import Script, dry_runs

        request, settings = self.request, self._settings
        spec, how = resolve_request(request), replace(strategy, activation_checkpointing="off")
        objective = spec.objective()

        def model() -> Any:
            built = spec.build(dtype=DTYPES[str(weights_of(settings))], device="meta")
            change(built, how)  # but for activation checkpointing, which is Trainer's own
            return built

        def train(model: Any) -> None:
            args = TrainingArguments(
                str(folder), per_device_train_batch_size=micro_batch, gradient_accumulation_steps=accumulation_steps,
                optim=settings.raw.get("optim", "adamw_torch_fused"), max_grad_norm=request.gradient_clipping,
                bf16=request.precision == "bf16", fp16=request.precision == "fp16", max_steps=2, report_to=[],
                gradient_checkpointing=strategy.activation_checkpointing != "off", save_strategy="no",
                gradient_checkpointing_kwargs=None if reentrant is None else {"use_reentrant": reentrant},
                logging_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            row = {name: rows[0] for name, rows in objective.example(1, request.seq_len).items()}
            trainer: Any = Trainer(model, args, train_dataset=[row] * (2 * micro_batch * accumulation_steps))
            trainer.compute_loss = lambda model, batch, *_, **__: objective.loss_sum(model, batch)
            trained = (each for each in model.parameters() if each.requires_grad and self.cluster.world_size > 1)
            trainer.buckets = [each.detach().clone() for each in trained]
            trainer.train()

        reentrant, one = settings.use_reentrant, with_gpus(replace(self.cluster, nodes=self.cluster.nodes[:1]), 1)
        with temporary.folder() as folder, redirect_stdout(io.StringIO()):
            script = partial(Script, request.model, train, {"model": model})
            return dry_runs(script, one, 1, expandable_segments=strategy.expandable_segments)
