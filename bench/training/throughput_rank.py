"""The contenders of `bench.training.throughput`, each an epoch over the same samples; they run on ranks.

All train the same weights with the same AdamW, clipping, constant learning rate, ZeRO stage and buckets. All pad with
the same collate function, without an attention mask, which peers would pass by default and causal attention does not
need. What differs is which samples share a micro-batch, and the loop around them.
"""

import gc
import io
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from frugal.config.optimizers import ADAM_BETA1, ADAM_BETA2, ADAM_EPSILON
from frugal.deepspeed_adapter.json_config import deepspeed_config
from frugal.models.objectives import CausalLM
from frugal.planning.plan import Plan

Samples = Sequence[dict[str, Any]]


@dataclass
class Meter:
    """The counts of a run: micro-batches, tokens with and without padding, and the loss of each step."""

    micro_batches: int = 0
    padded_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: tuple[float, ...] = ()

    def on(self, model: torch.nn.Module) -> None:
        """Count whatever `model` is called with."""
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.micro_batches += 1
        self.padded_tokens += tokens.numel()
        self.tokens += int((tokens != 0).sum())

    def begin(self) -> None:
        """All ranks are ready."""
        dist.barrier()
        self.seconds = -time.perf_counter()

    def end(self) -> None:
        """All ranks are done."""
        dist.barrier()
        self.seconds += time.perf_counter()


def model_of(shape: dict[str, Any]) -> Any:
    """The same weights each time."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(GPT2Config(**shape)).train()


def frugal_loop(meter: Meter, plan: Plan, shape: dict[str, Any], samples: Any, steps: int, seed: int) -> None:
    """`frugal train`'s loop with its log, without saving and evaluating."""
    import msgspec
    from rich.console import Console

    from frugal.checkpoint.progress import Progress
    from frugal.config.run_settings import RunSettings
    from frugal.data.batches import GlobalBatches
    from frugal.engine import loop
    from frugal.engine.engine import initialize
    from frugal.engine.reports.metrics import METRICS, Log, PlannedMemory

    engine = initialize(model_of(shape), plan, CausalLM())
    meter.on(engine.module)
    batches = GlobalBatches(samples, global_batch=plan.batch.global_batch, seed=seed)
    with tempfile.TemporaryDirectory() as name:
        folder, rank = Path(name), dist.get_rank()
        asked = RunSettings(steps=steps, save_every=0, eval_every=0, out=folder)
        nowhere = Console(file=io.StringIO())
        with Log(folder, rank=rank, planned=PlannedMemory(1), total_steps=steps, console=nowhere) as log:
            meter.begin()
            loop.train(engine, batches, asked, log, start=Progress(step=0), total_steps=steps)
            meter.end()
        if rank == 0:
            lines = (folder / METRICS).read_bytes().splitlines()
            meter.losses = tuple(msgspec.json.decode(line)["loss"] for line in lines)
    engine.destroy()


def by_hand(meter: Meter, plan: Plan, shape: dict[str, Any], samples: Any, steps: int, seed: int) -> None:
    """A loop on DeepSpeed alone, with frugal's micro-batches and its JSON; it logs nothing but the loss."""
    import deepspeed

    from frugal.data.batches import GlobalBatches, MicroBatchLimits, share

    model = model_of(shape)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=deepspeed_config(plan))
    meter.on(model)
    rank, world_size, objective, losses = dist.get_rank(), dist.get_world_size(), CausalLM(), []
    batches = GlobalBatches(samples, global_batch=plan.batch.global_batch, seed=seed).iterate()
    meter.begin()
    for _ in range(steps):
        batch = next(batches)
        places = share(batch, MicroBatchLimits.of(plan), rank, plan.batch).places
        micro_batches = [objective.collate([batch[i] for i in own] or [objective.dummy()]) for own in places]
        targets = torch.tensor(sum(map(objective.count, micro_batches)))
        dist.all_reduce(targets)
        total = torch.zeros((), dtype=torch.float64)
        for number, micro_batch in enumerate(micro_batches):
            engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
            loss = objective.loss_sum(engine, micro_batch)
            total += loss.detach()
            engine.backward(loss * (world_size / targets.item()), scale_wrt_gas=False)
        engine.step()
        dist.all_reduce(total)
        losses.append(total.item() / targets.item())
    meter.end()
    meter.losses = tuple(losses)
    engine.destroy()


def _peers_config(plan: Plan) -> dict[str, Any]:
    """The plan's, in micro-batches of as many samples as it has of full length."""
    config = deepspeed_config(plan)
    micro_batch = plan.batch.micro_batch[0]
    config["train_micro_batch_size_per_gpu"] = micro_batch
    config["gradient_accumulation_steps"] = plan.batch.global_batch // (micro_batch * dist.get_world_size())
    config["train_batch_size"] = plan.batch.global_batch
    return config


def trainer(
    meter: Meter, plan: Plan, shape: dict[str, Any], samples: Any, steps: int, seed: int, sampling: str = "random"
) -> None:
    """HF Trainer with DeepSpeed. `sampling` is its `train_sampling_strategy`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    config = _peers_config(plan)
    request = plan.request

    class Timing(TrainerCallback):
        def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
            meter.begin()

        def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
            meter.end()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, deepspeed=config, use_cpu=True, max_steps=steps, seed=seed,
            per_device_train_batch_size=config["train_micro_batch_size_per_gpu"],
            gradient_accumulation_steps=config["gradient_accumulation_steps"],
            train_sampling_strategy=sampling, learning_rate=request.scaled_learning_rate, lr_scheduler_type="constant",
            weight_decay=request.weight_decay, adam_beta1=ADAM_BETA1, adam_beta2=ADAM_BETA2,
            adam_epsilon=ADAM_EPSILON, max_grad_norm=request.gradient_clipping, logging_steps=1, save_strategy="no",
            report_to=[], disable_tqdm=True, remove_unused_columns=False, use_cache=False,
        )  # fmt: skip
        model = model_of(shape)
        model.loss_type = "ForCausalLM"
        meter.on(model)
        made = Trainer(
            model=model, args=arguments, train_dataset=list(samples), data_collator=CausalLM().collate,
            callbacks=[Timing()],
        )  # fmt: skip
        made.train()
    meter.losses = tuple(record["loss"] for record in made.state.log_history if "loss" in record)
    made.model_wrapped.destroy()


def grouping_trainer(meter: Meter, plan: Plan, shape: dict[str, Any], samples: Any, steps: int, seed: int) -> None:
    """HF Trainer with samples of like length together.

    Its sampler sorts 50 batches together, but at most a quarter of the data. There is little data here, so all of it is
    sorted together, which pads as little as 50 batches do.
    """
    from transformers import trainer_pt_utils

    usual = trainer_pt_utils.get_length_grouped_indices
    trainer_pt_utils.get_length_grouped_indices = partial(usual, mega_batch_mult=len(samples))
    try:
        trainer(meter, plan, shape, samples, steps, seed, sampling="group_by_length")
    finally:
        trainer_pt_utils.get_length_grouped_indices = usual


def accelerated(meter: Meter, plan: Plan, shape: dict[str, Any], samples: Any, steps: int, seed: int) -> None:
    """The loop of Accelerate's documentation with its DeepSpeed plugin: random order, mean loss of each micro-batch."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin

    config, request = _peers_config(plan), plan.request
    del config["optimizer"]
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as `accelerate launch` does
    PartialState(cpu=True)
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(
        deepspeed_plugin=plugin, gradient_accumulation_steps=config["gradient_accumulation_steps"]
    )
    torch.manual_seed(seed)
    model = model_of(shape)
    model.loss_type = "ForCausalLM"
    meter.on(model)
    loader = torch.utils.data.DataLoader(
        list(samples), batch_size=config["train_micro_batch_size_per_gpu"], shuffle=True,
        collate_fn=CausalLM().collate, generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    adamw = torch.optim.AdamW(
        model.parameters(), lr=request.scaled_learning_rate, betas=(ADAM_BETA1, ADAM_BETA2), eps=ADAM_EPSILON,
        weight_decay=request.weight_decay, fused=True,
    )  # fmt: skip
    engine, optimizer, loader = accelerator.prepare(model, adamw, loader)
    losses: list[float] = []
    total, micro_steps = torch.zeros(()), config["gradient_accumulation_steps"]
    meter.begin()
    for number, batch in enumerate(loader, 1):
        with accelerator.accumulate(engine):
            loss = engine(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / micro_steps
        if number % micro_steps == 0:
            losses.append(accelerator.reduce(total, "mean").item())
            total = torch.zeros(())
            if len(losses) == steps:
                break
    meter.end()
    meter.losses = tuple(losses)
    engine.destroy()


CONTENDERS = {
    "frugal": frugal_loop,
    "by hand": by_hand,
    "trainer": trainer,
    "trainer, grouped": grouping_trainer,
    "accelerate": accelerated,
}


def run(name: str, plan: Plan, shape: dict[str, Any], samples: Any, steps: int, seed: int) -> dict[str, Any]:
    """Return what one contender takes on this rank."""
    from accelerate.state import AcceleratorState, GradientState

    meter = Meter()
    try:
        CONTENDERS[name](meter, plan, shape, samples, steps, seed)
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        gc.collect()
    return asdict(meter)
