"""The memory of a run without DeepSpeed: a dry run of transformers' Trainer itself, which axolotl, TRL and LLaMA-Factory
are made of, on a card that is pretended to it.

Under DDP each GPU does what one does alone, and keeps buckets of the gradients' size beside them. Left out: DDP's own
cut of the buckets, which changes what is reserved and not what is allocated.
"""

import io
from collections.abc import Mapping
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

_DTYPES: Mapping[str, Precision] = {
    "float32": "fp32", "fp32": "fp32", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16",
}  # fmt: skip
"""The types of weights as the tools write them, which may stand behind `torch.`."""


def weights_of(settings: Settings) -> Precision | None:
    """Return the type in which the weights are loaded that are trained; None where only the script knows it.

    `same` and `auto` are the run's own precision: axolotl loads it, and it is what models are published in.
    """
    said = str(settings.raw.get("dtype") or ("same" if settings.precision == "fp32" else "")).removeprefix("torch.")
    return settings.precision if said in ("same", "auto") else _DTYPES.get(said)


class TrainerSource(DryRunSource):
    """A source whose stage 0 is Trainer without DeepSpeed."""

    def __init__(self, request: Request, cluster: Cluster, settings: Settings, pool: Pool | None) -> None:
        reentrant = settings.use_reentrant
        self._weights = weights_of(settings)
        self._arguments = {
            "optim": settings.raw.get("optim", "adamw_torch_fused"),
            "max_grad_norm": request.gradient_clipping,
            "gradient_checkpointing_kwargs": None if reentrant is None else {"use_reentrant": reentrant},
            "bf16": request.precision == "bf16",
            "fp16": request.precision == "fp16",
        }
        super().__init__(request, cluster, pool=pool)

    def _key(self) -> list[object]:
        """Return what a dry run depends on, and that these are not DeepSpeed's."""
        return [*super()._key(), "Trainer", self._weights, str(self._arguments), self.request.seq_len]

    def dry_runs(self, strategy: Strategy, micro_batch: int, accumulation_steps: int) -> list[DryRun]:
        """Return the dry run of one rank at stage 0; all are alike. Otherwise, and raises, as DeepSpeed's."""
        if strategy.zero_stage:
            return super().dry_runs(strategy, micro_batch, accumulation_steps)
        from frugal.tools.own_loop.run import Script, dry_runs  # torch takes seconds

        one = with_gpus(replace(self.cluster, nodes=self.cluster.nodes[:1]), 1)
        with temporary.folder() as folder, redirect_stdout(io.StringIO()):
            sizes = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": accumulation_steps}
            parts = {"model": lambda: self._built(strategy)}
            train = partial(self._train, {"output_dir": str(folder), **self._arguments, **sizes}, strategy)
            script = partial(Script, self.request.model, train, parts)
            return dry_runs(script, one, 1, expandable_segments=strategy.expandable_segments)

    def _built(self, strategy: Strategy) -> Any:
        from frugal.deepspeed_adapter.kernels import DTYPES
        from frugal.engine.train_step import change
        from frugal.models.resolve import resolve_request

        model = resolve_request(self.request).build(dtype=DTYPES[str(self._weights)], device="meta")
        change(model, replace(strategy, activation_checkpointing="off"))
        return model

    def _train(self, arguments: Mapping[str, Any], strategy: Strategy, model: Any) -> None:
        """Train for two optimizer steps, the second as all later ones."""
        import torch
        from transformers import Trainer, TrainingArguments

        from frugal.models.resolve import resolve_request

        objective = resolve_request(self.request).objective()

        class Loop(Trainer):
            """Trainer with the objective's loss, which may be tiled."""

            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
                return objective.loss_sum(model, inputs)

        args = TrainingArguments(
            **arguments, gradient_checkpointing=strategy.activation_checkpointing != "off", max_steps=2, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        row = {name: rows[0] for name, rows in objective.example(1, self.request.seq_len).items()}
        samples = [row] * (2 * args.per_device_train_batch_size * args.gradient_accumulation_steps)
        trainer = Loop(model, args, train_dataset=samples)
        is_alone = self.cluster.world_size == 1
        buckets = [torch.empty_like(each) for each in model.parameters() if each.requires_grad and not is_alone]
        trainer.train()
        del buckets
