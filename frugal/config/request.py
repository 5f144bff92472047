"""What the user asks for.

Whether what the user pinned can be true at once.
"""

import math
from dataclasses import dataclass
from typing import Literal

from frugal.config import optimizers
from frugal.config.learning_rate import Rule, Scaling, check_rule
from frugal.config.optimizers import OptimizerImplementation, OptimizerName
from frugal.config.sample_lengths import Lengths
from frugal.errors import RequestError

Task = Literal["causal-lm", "masked-lm", "seq2seq", "sequence-classification"]
Precision = Literal["bf16", "fp16", "fp32"]
ActivationCheckpointingChoice = Literal["auto", "off", "selective", "full", "offloaded"]
LossChoice = Literal["auto", "plain", "tiled"]
AccumulationDtype = Literal["fp32", "bf16"]
OffloadChoice = Literal["auto", "none", "optimizer", "all", "nvme"]

DEFAULT_GLOBAL_BATCH = 512

MOST_SAMPLES = 10_000_000
"""Of a global batch. A rank lists its micro-batch sizes one by one: tens of megabytes for so many."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One training run as the user wants it; `None` leaves the decision to frugal.

    Attributes:
        model: a preset, a transformers model type, a config.json or model folder, `package.module:factory`,
            or a hub name.
        task: what is trained; None: what the model's architecture is for.
        global_batch: samples per optimizer step over all GPUs.
        global_tokens: tokens per optimizer step over all GPUs; as many whole samples as fit, never over. Of pairs
            the target's tokens count. Given both, tokens win.
        seq_len: tokens in the longest sample; of pairs, in the longer side.
        max_samples_per_gpu: cap on the micro-batch, samples.
        max_tokens_per_gpu: cap on the micro-batch, tokens (padding counts; of pairs on either side).
        micro_batch: pinned micro-batch, samples per GPU and micro-step.
        accumulation_steps: pinned micro-steps per optimizer step.
        zero_stage: pinned ZeRO stage, 0-3.
        activation_checkpointing: `auto` switches it on when it is needed or pays; see `Strategy` for the modes.
        loss: `plain` holds the logits whole, `tiled` a slice at a time; `auto` takes what makes the step faster.
        offload: what may live in host memory; `auto`: nothing, unless nothing fits without. `nvme`: the optimizer's
            states live on an NVMe disk, the parameters there or in host memory.
        nvme_path: a folder on a disk of each node, for `nvme`; without it disks are not used.
        precision: of weights, activations and gradients in forward and backward.
        optimizer: what updates the parameters.
        optimizer_implementation: whose kernels; None: torch's fused ones where there are any.
        momentum: of SGD; None: none.
        learning_rate: peak learning rate; of `reference_batch`, where there is one.
        reference_batch: the global batch that `learning_rate` was found for, in the unit of the target: tokens with
            `global_tokens`, samples otherwise. None: the rate is for the global batch that is asked for.
        lr_rule: how the rate grows with the batch; see `frugal.config.learning_rate`.
        weight_decay: decoupled for AdamW.
        gradient_clipping: largest norm of the global gradient; 0 switches clipping off.
        gradient_accumulation_dtype: of gradients summed over micro-steps; None: fp32. `bf16` halves their memory, and
            loses more with every micro-step.
        overlap_comm: let gradients travel while backward goes on; None: no.
        reduce_bucket_elements: pinned size of DeepSpeed's gradient bucket, elements.
        lengths: tokens of the data's samples, where they are known; see `frugal.planning.length_bucketing`.
        pack: put several documents into one sample of up to `seq_len` tokens, in which they do not see each other;
            None: no.
    """

    model: str = "gpt2"
    task: Task | None = None
    global_batch: int | None = None
    global_tokens: int | None = None
    seq_len: int = 1024
    max_samples_per_gpu: int | None = None
    max_tokens_per_gpu: int | None = None
    micro_batch: int | None = None
    accumulation_steps: int | None = None
    zero_stage: int | None = None
    activation_checkpointing: ActivationCheckpointingChoice = "auto"
    loss: LossChoice = "auto"
    offload: OffloadChoice = "auto"
    nvme_path: str | None = None
    precision: Precision = "bf16"
    optimizer: OptimizerName = "adamw"
    optimizer_implementation: OptimizerImplementation | None = None
    momentum: float | None = None
    learning_rate: float = 3e-4
    reference_batch: int | None = None
    lr_rule: Rule | None = None
    weight_decay: float = 0.01
    gradient_clipping: float = 1.0
    gradient_accumulation_dtype: AccumulationDtype | None = None
    overlap_comm: bool | None = None
    reduce_bucket_elements: int | None = None
    lengths: Lengths | None = None
    pack: bool | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_precision()
        self._check_places()
        self._check_batch()

    def _check_numbers(self) -> None:
        """Each by itself."""
        if not self.model.strip():
            raise RequestError(
                "--model is empty",
                hint=f"leave it out for {Request.model}, or give a preset, a config.json or a model folder",
            )
        for name in (
            "global_batch", "global_tokens", "seq_len", "max_samples_per_gpu", "max_tokens_per_gpu",
            "micro_batch", "accumulation_steps", "reduce_bucket_elements", "reference_batch",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "--" + name.replace("_", "-")
                raise RequestError(
                    f"{flag} is {value}", because="it must be at least 1", hint=f"leave {flag} out to let frugal decide"
                )
        if self.zero_stage is not None and not 0 <= self.zero_stage <= 3:
            raise RequestError(f"--zero-stage is {self.zero_stage}", because="ZeRO has the stages 0, 1, 2 and 3")
        for name in ("learning_rate", "weight_decay", "gradient_clipping", "momentum"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise RequestError(
                    f"--{name.replace('_', '-')} is {value:g}", because="it must be a finite number, at least 0"
                )

    def _check_precision(self) -> None:
        """What DeepSpeed can train right."""
        if self.precision != "fp32" and self.zero_stage in (0, 1):
            raise RequestError(
                f"--precision {self.precision} with --zero-stage {self.zero_stage} is not trained right by DeepSpeed",
                because=(
                    "stage 0 starts Adam at its second step"
                    if self.zero_stage == 0
                    else "stage 1 cannot accumulate gradients in fp32 without losing some"
                ),
                hint="use --zero-stage 2, also on one GPU, or --precision fp32",
            )
        if self.gradient_accumulation_dtype == "bf16" and self.precision != "bf16":
            raise RequestError(
                f"--gradient-accumulation-dtype bf16 is impossible with --precision {self.precision}",
                because="only sums of bf16 gradients are kept in bf16",
                hint="leave one of them out",
            )
        optimizers.check(
            self.optimizer,
            self.optimizer_implementation,
            momentum=self.momentum,
            precision=self.precision,
            zero_stage=self.zero_stage,
            offload=self.offload,
        )

    def _check_places(self) -> None:
        """Where optimizer and parameters are to live, and the bucket in which gradients travel."""
        if self.offload == "nvme" and not self.nvme_path:
            raise RequestError(
                "--offload nvme was given without --nvme-path",
                because="no node's disk is used unasked",
                hint="name a folder on a fast local disk: --nvme-path /local/scratch",
            )
        needed_stage = {"optimizer": (1, 2, 3), "all": (3,), "nvme": (3,)}.get(self.offload, (0, 1, 2, 3))
        if self.zero_stage is not None and self.zero_stage not in needed_stage:
            raise RequestError(
                f"--offload {self.offload} is impossible with --zero-stage {self.zero_stage}",
                because=f"it needs ZeRO stage {' or '.join(map(str, needed_stage))}",
                hint="leave --zero-stage out to let frugal decide",
            )
        if self.reduce_bucket_elements is not None and self.reduce_bucket_elements % 2:
            raise RequestError(
                f"--reduce-bucket-elements is {self.reduce_bucket_elements}",
                because="DeepSpeed aligns its buckets to 2 elements",
                hint=f"use --reduce-bucket-elements {self.reduce_bucket_elements + 1}",
            )

    def _check_batch(self) -> None:
        """The global batch, and the learning rate that goes with it."""
        if self.global_tokens is not None and self.global_tokens < self.seq_len:
            raise RequestError(
                f"--global-tokens {self.global_tokens} is less than one sample",
                because=f"a sample has up to {self.seq_len} tokens",
                hint=f"ask for at least {self.seq_len} tokens, or shorten --seq-len",
            )
        check_rule(self.reference_batch, self.lr_rule, self.optimizer)
        if self.reference_batch is not None and self.global_tokens is not None and self.reference_batch < self.seq_len:
            raise RequestError(
                f"--reference-batch {self.reference_batch} is less than one sample",
                because=f"with --global-tokens it counts tokens, and a sample has up to {self.seq_len}",
                hint=f"{self.reference_batch} samples are --reference-batch {self.reference_batch * self.seq_len}",
            )
        if self.batch_samples > MOST_SAMPLES:
            raise RequestError(
                f"a global batch of {self.batch_samples:,} samples is too large for a plan",
                because=f"a plan names the samples of every micro-step, and can do so for {MOST_SAMPLES:,}",
                hint=f"ask for at most {MOST_SAMPLES:,} samples",
            )

    @property
    def batch_samples(self) -> int:
        """Samples of full length in one global batch; for a token target as many of them as fit."""
        if self.global_tokens is not None:
            return self.global_tokens // self.seq_len
        return self.global_batch if self.global_batch is not None else DEFAULT_GLOBAL_BATCH

    @property
    def learning_rate_scaling(self) -> Scaling | None:
        """From the reference batch to the one that is asked for; None where there is no reference."""
        if self.reference_batch is None or self.lr_rule is None:
            return None
        return Scaling(
            rate=self.learning_rate,
            rule=self.lr_rule,
            batch=self.batch_samples if self.global_tokens is None else self.global_tokens,
            reference_batch=self.reference_batch,
            unit="samples" if self.global_tokens is None else "tokens",
        )

    @property
    def scaled_learning_rate(self) -> float:
        """The peak learning rate that training uses. The number of GPUs never changes it."""
        scaling = self.learning_rate_scaling
        return self.learning_rate if scaling is None else scaling.scaled

    @property
    def micro_batch_cap(self) -> int | None:
        """The largest micro-batch the request allows, samples; None if memory alone decides.

        Raises:
            RequestError: a token cap below one sample.
        """
        caps = [cap for cap in (self.micro_batch, self.max_samples_per_gpu) if cap is not None]
        if self.max_tokens_per_gpu is not None:
            if self.max_tokens_per_gpu < self.seq_len:
                raise RequestError(
                    f"--max-tokens-per-gpu {self.max_tokens_per_gpu} is less than one sample",
                    because=f"a sample has up to {self.seq_len} tokens",
                    hint=f"allow at least {self.seq_len} tokens, or shorten --seq-len",
                )
            caps.append(self.max_tokens_per_gpu // self.seq_len)
        return min(caps, default=None)


def check_pins(request: Request, world_size: int) -> None:
    """Micro-batch, accumulation steps and caps against the global batch on `world_size` ranks.

    Both pins together must be what the micro-batches come out as: n = ceil(batch / (micro x ranks)) and
    micro = ceil(batch / (n x ranks)). A micro-batch alone is a cap that is reached unless the batch is too small.

    Raises:
        RequestError: they contradict each other; the message has the numbers.
    """
    batch, micro, steps = request.batch_samples, request.micro_batch, request.accumulation_steps
    gpus = f"{world_size} GPU{'s' if world_size > 1 else ''}"
    cap = request.micro_batch_cap
    if micro is not None and cap is not None and cap < micro:
        name = "--max-samples-per-gpu" if request.max_samples_per_gpu == cap else "--max-tokens-per-gpu"
        raise RequestError(
            f"--micro-batch {micro} is over the cap of {name}",
            because=f"{name} allows {cap} samples of {request.seq_len} tokens",
            hint=f"leave one of them out, or use --micro-batch {cap}",
        )
    if steps is None:
        return
    needed = -(-batch // (steps * world_size))
    if steps > batch:
        raise RequestError(
            f"--accumulation-steps {steps} is more than the {batch} samples of the global batch",
            because="every micro-step needs at least one sample",
            hint=f"use at most --accumulation-steps {batch}",
        )
    if micro is None:
        if cap is not None and cap < needed:
            raise RequestError(
                f"--accumulation-steps {steps} on {gpus} needs a micro-batch of {needed}",
                because=f"the caps allow {cap}",
                hint=f"use --accumulation-steps {-(-batch // (cap * world_size))}, or leave it out",
            )
        return
    fewest = -(-batch // (micro * world_size))
    if steps == fewest and micro == needed:
        return
    capacity = micro * steps * world_size
    ways = [f"--global-batch {capacity}"] if request.global_tokens is None else []
    if -(-batch // (fewest * world_size)) == micro:
        ways.insert(0, f"--accumulation-steps {fewest}")
    if -(-batch // (needed * world_size)) == steps:
        ways.insert(0, f"--micro-batch {needed}")
    raise RequestError(
        f"--micro-batch {micro} --accumulation-steps {steps} on {gpus} is {capacity}, not {batch}",
        because=f"{micro} x {steps} x {world_size} = {capacity} samples, and the global batch is {batch}",
        hint=f"use {', or '.join(ways)}" if ways else "leave one of the two out",
    )
