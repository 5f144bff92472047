"""What the user asks for, and whether what is pinned can be true at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from frugal.config import layers, optimizers
from frugal.config.adapters import Lora
from frugal.config.layers import LayerModes
from frugal.config.optimizers import (
    STATE_BYTES,
    OptimizerImplementation,
    OptimizerName,
    OptimizerStates,
    Rule,
    Scaling,
    check_rule,
)
from frugal.config.sample_lengths import Lengths
from frugal.config.setting import LENGTH, Kind, check_sizes, setting
from frugal.errors import RequestError

Task = Literal["causal-lm", "masked-lm", "seq2seq", "sequence-classification"]
Precision = Literal["bf16", "fp16", "fp32"]
ActivationCheckpointingChoice = Literal["auto", "off", "selective", "full", "offloaded", "budget"]
LossChoice = Literal["auto", "plain", "tiled"]
AccumulationDtype = Literal["fp32", "bf16"]
BatchNormChoice = Literal["local", "frozen", "sync"]
OffloadChoice = Literal["auto", "none", "optimizer", "all", "nvme"]
Quantization = Literal["nf4"]

DEFAULT_GLOBAL_BATCH = 512

MOST_SAMPLES = 10_000_000
"""Of a global batch. A rank lists its micro-batch sizes one by one: tens of megabytes for so many."""

LENGTHS = Kind(
    str,
    "a file, a list of tokens or a table of tokens and samples",
    lambda value: isinstance(value, str | list | tuple | Mapping | Lengths),
)


LORA = Kind(
    str, "text such as r=16,alpha=32 or a table of these", lambda value: isinstance(value, str | Mapping | Lora)
)


LAYER_MODES = Kind(
    str,
    "text such as full:0-19,off:20-31 or pairs of a mode and a number of layers",
    lambda value: isinstance(value, str | list | tuple | LayerModes),
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One training run as the user wants it; `None` leaves the decision to frugal."""

    model: str = setting(
        "gpt2",
        "Preset, transformers model type, config.json, model folder, package.module:factory or hub name.",
        "model and batch", is_first=True,
    )  # fmt: skip
    task: Task | None = setting(None, "What is trained.", "model and batch", shown_default="what the model is for")
    global_batch: int | None = setting(
        None, "Samples per optimizer step over all GPUs.", "model and batch", least=1, is_first=True,
        shown_default=str(DEFAULT_GLOBAL_BATCH),
    )  # fmt: skip
    global_tokens: int | None = setting(
        None,
        "Tokens per optimizer step over all GPUs: as many whole samples as fit, never over. Of pairs the target's "
        "count. Wins over --global-batch.",
        "model and batch", least=1,
    )  # fmt: skip
    seq_len: int = setting(
        1024, "Tokens in the longest sample; of pairs, in the longer side. 128k is 131072.", "model and batch", least=1,
        is_first=True, kind=LENGTH,
    )  # fmt: skip
    max_samples_per_gpu: int | None = setting(None, "Cap on the micro-batch, samples.", "memory and speed", least=1)
    max_tokens_per_gpu: int | None = setting(
        None, "Cap on the micro-batch, tokens: padding counts; of pairs on either side.", "memory and speed", least=1
    )
    micro_batch: int | None = setting(
        None, "Pin the micro-batch: samples of one GPU in one micro-step.", "memory and speed", least=1
    )
    accumulation_steps: int | None = setting(
        None, "Pin the micro-steps per optimizer step.", "memory and speed", least=1
    )
    even: bool | None = setting(
        None,
        "Equal micro-batches only: micro-batch x accumulation steps x GPUs is the global batch, so that DeepSpeed's "
        "JSON alone trains it, too.",
        "memory and speed", shown_default="no",
    )  # fmt: skip
    zero_stage: int | None = setting(None, "Pin the ZeRO stage, 0-3.", "memory and speed")
    activation_checkpointing: ActivationCheckpointingChoice = setting(
        "auto",
        "Recompute activations in backward; `auto` and `budget`: in the layers where it is needed or pays.",
        "memory and speed",
    )
    layer_modes: LayerModes | None = setting(
        None,
        "Pin the mode of activation checkpointing of every layer, numbered from 0 in the order in which they run.",
        "memory and speed", kind=LAYER_MODES, metavar="full:0-19,off:20-31", is_expert=True,
        shown_default="as --activation-checkpointing says",
    )  # fmt: skip
    loss: LossChoice = setting(
        "auto",
        "`plain` holds the logits whole, `tiled` a slice at a time; `auto` takes what makes the step faster.",
        "memory and speed", is_expert=True,
    )  # fmt: skip
    mlp: LossChoice = setting(
        "auto", "`tiled` runs each layer's MLP on a slice of the positions at a time; `auto`: where nothing else fits.",
        "memory and speed", is_expert=True,
    )  # fmt: skip
    offload: OffloadChoice = setting(
        "auto",
        "What may live in host memory; `auto`: nothing, unless nothing fits without. `nvme`: the optimizer's states "
        "on an NVMe disk, parameters there or in host memory.",
        "memory and speed",
    )
    offload_ratio: float | None = setting(
        None,
        "Pin the share of AdamW's update done in host memory under ZeRO-3; the rest stays on the GPUs. 1: all of it.",
        "memory and speed", least=0, is_expert=True,
        shown_default="with the optimizer in host memory, the share that is fastest",
    )  # fmt: skip
    nvme_path: str | None = setting(
        None, "Folder on a local disk of each node, for --offload nvme; without it disks are not used.",
        "memory and speed", metavar="DIR", is_expert=True,
    )  # fmt: skip
    lora: Lora | None = setting(
        None,
        "Train low-rank adapters and freeze the model: r=16, and alpha=32 (twice r), dropout=0.05 (0), dora, "
        "targets=q_proj,v_proj (all-linear).",
        "model and batch", kind=LORA, metavar="r=16[,...]", is_first=True,
    )  # fmt: skip
    quantize: Quantization | None = setting(
        None,
        "Keep the frozen model under --lora in 4 bits a weight (QLoRA's `nf4`). Needs bitsandbytes.",
        "model and batch", shown_default="not quantised",
    )  # fmt: skip
    precision: Precision = setting(
        "bf16", "Of weights, activations and gradients in forward and backward.", "model and batch", is_first=True
    )
    optimizer: OptimizerName = setting("adamw", "What updates the parameters.", "optimizer", refused=optimizers.REFUSED)
    optimizer_implementation: OptimizerImplementation | None = setting(
        None, "Whose kernels.", "optimizer", shown_default="torch's fused ones, if there are any", is_expert=True
    )
    optimizer_states: OptimizerStates | None = setting(
        None,
        "Of master weights, moments and momentum. bf16 halves their memory and changes the numbers: updates below "
        "1/256 of a weight are rounded away.",
        "optimizer", shown_default="fp32", short=("--states",),
    )  # fmt: skip
    momentum: float | None = setting(None, "Of --optimizer sgd.", "optimizer", least=0, shown_default="none")
    adam_beta1: float | None = setting(
        None, "What AdamW keeps of the mean gradient at each step.", "optimizer", least=0,
        shown_default=str(optimizers.ADAM_BETA1), is_expert=True,
    )  # fmt: skip
    adam_beta2: float | None = setting(
        None, "What AdamW keeps of the mean squared gradient at each step; torch's own default is 0.999.",
        "optimizer", least=0, shown_default=f"{optimizers.ADAM_BETA2}, as is usual for language models",
    )  # fmt: skip
    adam_epsilon: float | None = setting(
        None, "What AdamW adds to the root of the mean squared gradient.", "optimizer", least=0,
        shown_default=f"{optimizers.ADAM_EPSILON:g}", is_expert=True,
    )  # fmt: skip
    learning_rate: float = setting(
        3e-4, "Peak learning rate; of --reference-batch, where there is one.", "optimizer", least=0, short=("--lr",),
        is_first=True,
    )  # fmt: skip
    reference_batch: int | None = setting(
        None,
        "The global batch that --learning-rate was found for: samples, or tokens with --global-tokens.",
        "optimizer", least=1, shown_default="the one asked for", is_expert=True,
    )  # fmt: skip
    lr_rule: Rule | None = setting(
        None, "How the rate follows the batch from --reference-batch: linear (for SGD) or sqrt (for Adam).",
        "optimizer", is_expert=True,
    )  # fmt: skip
    weight_decay: float = setting(0.01, "Decoupled for AdamW.", "optimizer", least=0)
    decay_norms: bool | None = setting(
        None, "Whether weight decay takes norms and biases, too; HF Trainer's does not.", "optimizer",
        shown_default="yes",
    )  # fmt: skip
    gradient_clipping: float = setting(
        1.0, "Largest norm of the global gradient; 0: no clipping.", "optimizer", least=0
    )
    gradient_accumulation_dtype: AccumulationDtype | None = setting(
        None,
        "Of gradients summed over micro-steps. bf16 halves their memory, and loses more with every micro-step.",
        "memory and speed", shown_default="fp32", is_expert=True,
    )  # fmt: skip
    sequence_parallel: int | None = setting(
        None,
        "Pin the ranks that share each sample, a part of its tokens each (Ulysses).",
        "memory and speed", least=1, shown_default="as many as one sample needs",
    )  # fmt: skip
    overlap_comm: bool | None = setting(
        None, "Let gradients travel while backward goes on, for a second bucket.", "memory and speed",
        shown_default="no", is_expert=True,
    )  # fmt: skip
    expandable_segments: bool | None = setting(
        None, "Let torch's allocator grow one segment page by page (PYTORCH_ALLOC_CONF), instead of making many.",
        "memory and speed", shown_default="yes on GPUs, unless PYTORCH_ALLOC_CONF says otherwise", is_expert=True,
    )  # fmt: skip
    reduce_bucket_elements: int | None = setting(
        None, "Pin DeepSpeed's gradient bucket, elements.", "memory and speed", least=1, is_expert=True
    )
    lengths: Lengths | None = setting(
        None, "Plan for samples of these lengths: JSON, tokens of each or `{tokens: samples}`.", "model and batch",
        kind=LENGTHS, metavar="FILE", is_expert=True,
    )  # fmt: skip
    pack: bool | None = setting(
        None, "Put several documents into one sample of --seq-len tokens; none sees another.", "model and batch",
        shown_default="no",
    )  # fmt: skip
    batch_norm: BatchNormChoice | None = setting(
        None,
        "Whose statistics BatchNorm takes: those of a rank's own micro-batch (`local`), of all ranks' (`sync`), "
        "or running ones (`frozen`), with which the gradient is exact however a batch is split.",
        "model and batch", shown_default="local", is_expert=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_precision()
        self._check_places()
        self._check_batch()
        self._check_quantization()

    def _check_numbers(self) -> None:
        """Each by itself."""
        if not self.model.strip():
            raise RequestError(
                "--model is empty",
                hint=f"leave it out for {Request.model}, or give a preset, a config.json or a model folder",
            )
        check_sizes(self, hint="leave {flag} out to let frugal decide")
        if self.zero_stage is not None and not 0 <= self.zero_stage <= 3:
            raise RequestError(f"--zero-stage is {self.zero_stage}", because="ZeRO has the stages 0, 1, 2 and 3")

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
        if self.decay_norms is False and self.optimizer == "sgd":
            raise RequestError(
                "--no-decay-norms is impossible with --optimizer sgd",
                because="its weight decay goes through the gradient; only AdamW's can leave parameters out",
                hint="leave one of them out",
            )
        optimizers.check(
            self.optimizer,
            self.optimizer_implementation,
            momentum=self.momentum,
            betas=(self.adam_beta1, self.adam_beta2),
            epsilon=self.adam_epsilon,
            offload=self.offload,
        )
        optimizers.check_states(
            self.optimizer_states,
            self.optimizer,
            self.optimizer_implementation,
            precision=self.precision,
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
        layers.check_modes(self.layer_modes, self.activation_checkpointing)
        layers.check_tiled_mlp(self.mlp, self.offload, self.activation_checkpointing, self.layer_modes)
        needed_stage = {"optimizer": (1, 2, 3), "all": (3,), "nvme": (3,)}.get(self.offload, (0, 1, 2, 3))
        if self.zero_stage is not None and self.zero_stage not in needed_stage:
            raise RequestError(
                f"--offload {self.offload} is impossible with --zero-stage {self.zero_stage}",
                because=f"it needs ZeRO stage {' or '.join(map(str, needed_stage))}",
                hint="leave --zero-stage out to let frugal decide",
            )
        optimizers.check_ratio(
            self.offload_ratio, self.zero_stage, self.offload, self.optimizer, self.optimizer_implementation
        )
        if self.reduce_bucket_elements is not None and self.reduce_bucket_elements % 2:
            raise RequestError(
                f"--reduce-bucket-elements is {self.reduce_bucket_elements}",
                because="DeepSpeed aligns its buckets to 2 elements",
                hint=f"use --reduce-bucket-elements {self.reduce_bucket_elements + 1}",
            )

    def _check_quantization(self) -> None:
        """Weights in few bits cannot be trained, only what is added to them."""
        if self.quantize is None:
            return
        if self.lora is None:
            raise RequestError(
                f"--quantize {self.quantize} was given without --lora",
                because="quantised weights are frozen, and nothing else is there to be trained",
                hint="add --lora r=16, or leave --quantize out",
            )
        if self.lora.dora:
            raise RequestError(
                f"--quantize {self.quantize} is impossible with dora in --lora",
                because="for the norms of quantised weights peft puts others in their place, unknown to ZeRO-3",
                hint="leave one of them out",
            )
        if self.offload == "nvme":
            raise RequestError(
                f"--quantize {self.quantize} is impossible with --offload nvme",
                because="DeepSpeed's buffers between a disk and the device hold one type, and quantised weights are "
                "bytes beside parameters in the run's precision",
                hint="use --offload all, which keeps them in host memory",
            )

    def _check_batch(self) -> None:
        """The global batch, and the learning rate that goes with it."""
        if self.global_tokens is not None and self.global_tokens < self.seq_len:
            raise RequestError(
                f"--global-tokens {self.global_tokens} is less than one sample",
                because=f"a sample has up to {self.seq_len} tokens",
                hint=f"ask for at least {self.seq_len} tokens, or shorten --seq-len",
            )
        if self.batch_norm == "sync" and self.global_tokens is not None:
            raise RequestError(
                "--batch-norm sync is impossible with --global-tokens",
                because="a rank that gets no sample in a micro-step has no statistics to add",
                hint="use --global-batch, or --batch-norm frozen",
            )
        if self.even and self.global_tokens is not None:
            raise RequestError(
                "--even is impossible with --global-tokens",
                because="as many samples as have so many tokens are now more, now fewer",
                hint=f"use --global-batch {self.batch_samples}",
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
    def decays_all(self) -> bool:
        """Whether all parameters decay alike, by the optimizer itself."""
        return self.decay_norms is not False or self.weight_decay == 0

    @property
    def master_bytes_per_element(self) -> int:
        """Of the weights that the optimizer updates."""
        return STATE_BYTES[self.optimizer_states or "fp32"]

    @property
    def state_bytes_per_element(self) -> float:
        """What the optimizer keeps of each of them."""
        return optimizers.state_bytes_per_element(self.optimizer, self.momentum, self.optimizer_states or "fp32")

    @property
    def betas(self) -> tuple[float, float]:
        """Of AdamW: what its two means keep at each step."""
        first, second = self.adam_beta1, self.adam_beta2
        return (
            optimizers.ADAM_BETA1 if first is None else first,
            optimizers.ADAM_BETA2 if second is None else second,
        )

    @property
    def epsilon(self) -> float:
        """Of AdamW: what is added to the root of the mean squared gradient."""
        return optimizers.ADAM_EPSILON if self.adam_epsilon is None else self.adam_epsilon

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
