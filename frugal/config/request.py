"""A training run as the user asks for it, and checks that its settings do not contradict each other."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Literal, get_args

from frugal.config import layers, sample_lengths
from frugal.config.adapters import LORA, Lora
from frugal.config.optimizers import OPTIMIZER, SOURCES, Optimizer, OptimizerName, Rule
from frugal.config.setting import LENGTH, Kind, check_sizes, setting
from frugal.errors import refuse

Task = Literal["causal-lm", "masked-lm", "seq2seq", "sequence-classification"]
Precision = Literal["bf16", "fp16", "fp32"]
ActivationCheckpointingChoice = Literal["auto", "off", "selective", "full", "offloaded", "budget"]
LossChoice = Literal["auto", "plain", "tiled"]
KernelsChoice = Literal["auto", "liger", "plain"]
BatchNormChoice = Literal["local", "frozen"]
OffloadChoice = Literal["auto", "none", "optimizer", "all", "nvme"]
Quantization = Literal["nf4"]

DEFAULT_GLOBAL_BATCH = 512

MOST_SAMPLES = 10_000_000
"""Maximum samples of a global batch: a rank lists its micro-batch sizes one by one, in tens of megabytes."""

LENGTHS = Kind(
    str,
    "a file, a list of tokens or a table of tokens and samples",
    lambda value: isinstance(value, str | list | tuple | Mapping | sample_lengths.Lengths),
    make=sample_lengths.of,
)


CHECKPOINTING = Kind(
    str,
    f"one of {', '.join(get_args(ActivationCheckpointingChoice))}, or modes of layers such as full:0-19,off:20-31",
    lambda value: (
        value in get_args(ActivationCheckpointingChoice)
        or isinstance(value, list | tuple | layers.LayerModes)
        or (isinstance(value, str) and ":" in value)
    ),
)
_STATES_IN_BF16 = "`states` bf16 of --optimizer is impossible with"
_PLACE = re.compile(r"optimizer:(\d{1,12}\.?\d{0,12}|\.\d{1,12})|(nvme|auto):.+")
OFFLOAD = Kind(
    str,
    f"one of {', '.join(get_args(OffloadChoice))}, a share such as optimizer:0.5, or a disk such as nvme:/scratch",
    lambda value: isinstance(value, str) and (value in get_args(OffloadChoice) or _PLACE.fullmatch(value) is not None),
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A training run as the user wants it; `None` leaves the decision to frugal."""

    model: str = setting(
        "gpt2",
        "Preset, transformers model type, config.json, model folder, package.module:factory or hub name.",
        "model and batch", is_first=True,
    )  # fmt: skip
    task: Task | None = setting(None, "Training task.", "model and batch", shown_default="the model's own")
    global_batch: int | None = setting(
        None, "Samples per optimizer step over all GPUs.", "model and batch", least=1, is_first=True,
        shown_default=str(DEFAULT_GLOBAL_BATCH),
    )  # fmt: skip
    global_tokens: int | None = setting(
        None,
        "Tokens per optimizer step over all GPUs, instead of --global-batch: as many whole samples as fit. For pairs "
        "target tokens count.",
        "model and batch", least=1,
    )  # fmt: skip
    seq_len: int = setting(
        1024, "Maximum tokens per sample (for pairs: of the longer side). 4k is 4096 here, and 4000 in other counts.",
        "model and batch", least=1, is_first=True, kind=LENGTH,
    )  # fmt: skip
    max_tokens_per_gpu: int | None = setting(
        None,
        "Maximum tokens in a micro-batch, padding included; of pairs on either side.",
        "memory and speed",
        least=1,
        is_expert=True,
    )
    micro_batch: int | None = setting(
        None, "Pin the micro-batch: samples per GPU and micro-step.", "memory and speed", least=1
    )
    accumulation_steps: int | None = setting(
        None,
        "Pin the micro-steps per optimizer step.",
        "memory and speed",
        least=1,
        is_expert=True,
    )
    even: bool | None = None
    """True: micro-batches are equal, as `frugal export` plans them for targets that train no others."""
    zero_stage: int | None = setting(None, "Pin the ZeRO stage, 0-3.", "memory and speed", least=0, most=3)
    activation_checkpointing: ActivationCheckpointingChoice = setting(
        "auto",
        f"Recompute activations in backward: {', '.join(get_args(ActivationCheckpointingChoice))}; `auto` and "
        "`budget`: in the layers where it is needed or pays. `full:0-19,off:20-31` pins the mode of each layer.",
        "memory and speed", kind=CHECKPOINTING, metavar="MODE",
    )  # fmt: skip
    layer_modes: layers.LayerModes | None = None
    """Pinned by `activation_checkpointing`, whose value is `auto` then."""
    loss: LossChoice = setting(
        "auto",
        "`plain` holds the logits whole, `tiled` a slice at a time; `auto` takes what makes the step faster.",
        "memory and speed", is_expert=True,
    )  # fmt: skip
    mlp: LossChoice = setting(
        "auto", "`tiled` runs each layer's MLP on a slice of the positions at a time; `auto`: where nothing else fits.",
        "memory and speed", is_expert=True,
    )  # fmt: skip
    kernels: KernelsChoice = setting(
        "auto",
        "`liger` runs norms, rotations and gated MLPs in Liger's fused kernels, `plain` in torch's; `auto`: Liger's if "
        "it is installed and the GPUs can (compute capability 8.0 on).",
        "memory and speed", is_expert=True,
    )  # fmt: skip
    offload: OffloadChoice = setting(
        "auto",
        f"What may be in host memory: {', '.join(get_args(OffloadChoice))}. `auto`: only if nothing fits otherwise; "
        "`optimizer:0.5`: that share of AdamW's update under ZeRO-3; `nvme:DIR`: the optimizer's states are on an NVMe "
        "disk of each node, parameters there or in host memory; `auto:DIR`: also on that disk.",
        "memory and speed", kind=OFFLOAD, metavar="WHAT",
    )  # fmt: skip
    offload_ratio: float | None = None
    """Pinned by `offload`: above 0, at most 1."""
    nvme_path: str | None = None
    """The folder that `offload` names, on a local disk of each node; without it disks are not used."""
    lora: Lora | None = setting(
        None,
        "Train low-rank adapters and freeze the model: r=16, and alpha=32 (twice r), dropout=0.05 (0), dora, "
        "targets=q_proj,v_proj (all-linear).",
        "model and batch", kind=Kind.of(LORA, Lora.of), metavar="r=16[,...]", is_first=True,
    )  # fmt: skip
    quantize: Quantization | None = setting(
        None,
        "Keep the frozen model under --lora in 4 bits a weight (QLoRA's `nf4`). Needs bitsandbytes.",
        "model and batch", shown_default="not quantised",
    )  # fmt: skip
    precision: Precision = setting(
        "bf16", "Precision of weights, activations and gradients.", "model and batch", is_first=True
    )
    optimizer: Optimizer = setting(
        Optimizer(),
        f"Optimizer: {', '.join(get_args(OptimizerName))}, with keys such as beta2=0.99, momentum=0.9 or states=bf16.",
        "optimizer", kind=Kind.of(OPTIMIZER, Optimizer.of), metavar="NAME[,...]",
    )  # fmt: skip
    learning_rate: float = setting(3e-4, "Peak learning rate.", "optimizer", least=0, short=("--lr",), is_first=True)
    weight_decay: float = setting(0.01, "Weight decay; decoupled for AdamW.", "optimizer", least=0)
    gradient_clipping: float = setting(
        1.0, "Maximum norm of the global gradient; 0: no clipping.", "optimizer", least=0
    )
    sequence_parallel: int | None = setting(
        None,
        "Pin the number of ranks that share each sample's tokens (Ulysses).",
        "memory and speed", least=1, shown_default="as many as one sample needs", is_expert=True,
    )  # fmt: skip
    expandable_segments: bool | None = None
    """Segments of torch's allocator, as PYTORCH_ALLOC_CONF asks where the plan is made; None: expandable on GPUs."""
    lengths: sample_lengths.Lengths | None = setting(
        None, "Plan for samples of these lengths: JSON, tokens of each or `{tokens: samples}`.", "model and batch",
        kind=LENGTHS, metavar="FILE", is_expert=True,
    )  # fmt: skip
    pack: bool | None = setting(
        None, "Pack several documents into one sample of --seq-len tokens; none attends to another.", "model and batch",
        shown_default="no",
    )  # fmt: skip
    document_tokens: int = sample_lengths.DOCUMENT_TOKENS
    """Mean tokens of a pack's documents, at least; 0: attention takes masks. With --data that of the data."""
    batch_norm: BatchNormChoice | None = setting(
        None,
        "BatchNorm statistics: `local` micro-batch, or `frozen` running statistics, with which the gradient is exact "
        "however a batch is split.",
        "model and batch", shown_default="local", is_expert=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_sizes(self, hint="leave {flag} out to let frugal decide")
        self._check_numbers()
        self._check_places()
        self._check_batch()

    def _check_numbers(self) -> None:
        """Refuse precisions, optimizers and pins of layers that do not go together.

        DeepSpeed 0.19.8 takes `bf16_master_weights_and_grads` with `bf16_optimizer_states` under ZeRO 1 to 3 for a
        model in bf16 (runtime/config.py), and on the host only with its own CPU Adam (`_configure_master_weights` of
        runtime/base_optimizer.py). The same keys for fp16 need the optimizer on the host, and keep its states in fp32.
        """
        optimizer, modes = self.optimizer, self.layer_modes
        because = "stage 0 starts Adam at its second step"
        if self.zero_stage == 1:
            because = "stage 1 cannot accumulate gradients in fp32 without losing some"
        refuse(
            (
                not self.model.strip(),
                "--model is empty",
                "",
                f"leave it out for {Request.model}, or give a preset, a config.json or a model folder",
            ),
            (
                self.precision != "fp32" and self.zero_stage in (0, 1),
                f"--precision {self.precision} with --zero-stage {self.zero_stage} is not trained right by DeepSpeed",
                because,
                "use --zero-stage 2, also on one GPU, or --precision fp32",
            ),
            (
                optimizer.gradient_accumulation_dtype == "bf16" and self.precision != "bf16",
                f"`gradient-accumulation-dtype` bf16 is impossible with --precision {self.precision}",
                "only sums of bf16 gradients are kept in bf16",
                "leave one of them out",
            ),
            (
                optimizer.states == "bf16" and self.precision != "bf16",
                f"{_STATES_IN_BF16} --precision {self.precision}",
                "they are rounded to the model's own type",
                "use --precision bf16, or leave it out",
            ),
            (
                self.mlp == "tiled"
                and (self.activation_checkpointing == "selective" or (modes and "selective" in dict(modes.runs))),
                f"--mlp tiled is impossible with {layers.FLAG} {modes or self.activation_checkpointing}",
                "selective keeps the products of all slices until backward",
                "leave one of them out",
            ),
            (
                self.quantize and self.lora is None,
                f"--quantize {self.quantize} was given without --lora",
                "quantised weights are frozen, and nothing else is there to be trained",
                "add --lora r=16, or leave --quantize out",
            ),
            (
                self.quantize and self.lora is not None and self.lora.dora,
                f"--quantize {self.quantize} is impossible with dora in --lora",
                "for the norms of quantised weights peft replaces them with others that ZeRO-3 does not know",
                "leave one of them out",
            ),
        )

    def _check_places(self) -> None:
        """Refuse places of optimizer and parameters that other settings do not allow."""
        optimizer, offload, ratio, stage = self.optimizer, self.offload, self.offload_ratio, self.zero_stage
        needed_stage = {"optimizer": (1, 2, 3), "all": (3,), "nvme": (3,)}.get(offload, (0, 1, 2, 3))
        on_nvme, is_part = offload == "nvme", ratio not in (None, 1)
        in_part = f"--offload optimizer:{ratio or 0:g}"
        why_not, because = optimizer.why_not_in_part or ("", "")
        refuse(
            (
                on_nvme and not self.nvme_path,
                "--offload nvme was given without a folder",
                "no node's disk is used unasked",
                "name one on a fast local disk: --offload nvme:/local/scratch",
            ),
            (
                stage is not None and stage not in needed_stage,
                f"--offload {offload} is impossible with --zero-stage {stage}",
                f"it needs ZeRO stage {' or '.join(map(str, needed_stage))}",
                "leave --zero-stage out to let frugal decide",
            ),
            (
                on_nvme and self.quantize,
                f"--quantize {self.quantize} is impossible with --offload nvme",
                "DeepSpeed's buffers between a disk and the device hold one type, and quantised weights are bytes "
                "beside parameters in the run's precision",
                "use --offload all, which keeps them in host memory",
            ),
            (
                on_nvme and self.mlp == "tiled",
                "--mlp tiled is impossible with --offload nvme",
                "an MLP's parameters are gathered all at once, for which there may be too few buffers",
                "leave one of them out",
            ),
            (
                on_nvme and optimizer.name == "adamw-8bit",
                "--optimizer adamw-8bit cannot be used with --offload nvme",
                "DeepSpeed moves only states in fp32 to disk",
                "use --optimizer adamw, or --offload all",
            ),
            (
                on_nvme and optimizer.states == "bf16",
                f"{_STATES_IN_BF16} --offload nvme",
                "DeepSpeed moves only states in fp32 to disk",
                "use --offload all, or leave it out",
            ),
            (
                offload in ("optimizer", "all") and not optimizer.can_be_on_host,
                f"{_STATES_IN_BF16} --offload {offload}",
                "on the host only DeepSpeed's own CPU Adam keeps states in bf16",
                "use --optimizer adamw without an implementation, or leave it out",
            ),
            (
                is_part and not 0 < (ratio or 0) < 1,
                f"{in_part} has no share of the update",
                "it must be above 0, and 1 at most",
                "use --offload optimizer to let frugal decide, or --offload none to keep the optimizer on the GPUs",
            ),
            (
                is_part and stage not in (None, 3),
                f"{in_part} is impossible with --zero-stage {stage}",
                "DeepSpeed splits the optimizer's work only in ZeRO-3",
                "use --zero-stage 3, or --offload optimizer",
            ),
            (is_part and why_not, f"{in_part} is impossible with {why_not}", because, "use --offload optimizer"),
        )

    def _check_batch(self) -> None:
        """Check the global batch, and the batch of the learning rate."""
        tokens, reference = self.global_tokens, self.optimizer.reference_batch or 0
        refuse(
            (
                tokens is not None and tokens < self.seq_len,
                f"--global-tokens {tokens} is less than one sample",
                f"a sample has up to {self.seq_len} tokens",
                f"ask for at least {self.seq_len} tokens, or shorten --seq-len",
            ),
            (
                tokens is not None and self.even,
                "equal micro-batches are impossible with --global-tokens",
                "the number of samples that have that many tokens varies",
                f"use --global-batch {self.batch_samples}",
            ),
            (
                tokens is not None and 0 < reference < self.seq_len,
                f"`reference-batch` {reference} is less than one sample",
                f"with --global-tokens it counts tokens, and a sample has up to {self.seq_len}",
                f"{reference} samples are --set optimizer.reference-batch={reference * self.seq_len}",
            ),
            (
                self.batch_samples > MOST_SAMPLES,
                f"a global batch of {self.batch_samples:,} samples is too large for a plan",
                f"a plan names the samples of every micro-step, and can do so for {MOST_SAMPLES:,}",
                f"ask for at most {MOST_SAMPLES:,} samples",
            ),
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight, as it is trained."""
        return 4 if self.precision == "fp32" else 2

    @property
    def batch_samples(self) -> int:
        """Samples of full length in one global batch; with --global-tokens the number that fits."""
        if self.global_tokens is not None:
            return self.global_tokens // self.seq_len
        return self.global_batch if self.global_batch is not None else DEFAULT_GLOBAL_BATCH

    @property
    def scaled_learning_rate(self) -> float:
        """The peak learning rate that training uses. The number of GPUs never changes it."""
        return self._rate_by(self.optimizer.lr_rule)

    @property
    def learning_rate_in_words(self) -> str:
        """The same with its derivation from the rate that was found for the reference batch, if it has one."""
        reference, rule = self.optimizer.reference_batch, self.optimizer.lr_rule
        if reference is None:
            return f"{self.learning_rate:g}"
        ratio = f"{self._counted_batch}/{reference}"
        factor = f"sqrt({ratio})" if rule == "sqrt" else ratio
        basis = f"{rule} rule, from {reference} {'samples' if self.global_tokens is None else 'tokens'}"
        return f"{self.scaled_learning_rate:g} = {self.learning_rate:g} x {factor} ({basis})"

    @property
    def learning_rate_note(self) -> str | None:
        """A note if the rule was not made for the optimizer, with the rate of the one that was."""
        optimizer, right = self.optimizer, self.optimizer.fitting_rule
        if optimizer.lr_rule in (None, right) or self._counted_batch == optimizer.reference_batch:
            return None
        return (
            f"the {optimizer.lr_rule} rule is not made for {optimizer.name}: with optimizer.lr-rule {right} "
            f"({SOURCES[right]}) the learning rate would be {self._rate_by(right):g}"
        )

    def _rate_by(self, rule: Rule | None) -> float:
        """Return the learning rate that a rule scales from the reference batch to this one."""
        if self.optimizer.reference_batch is None:
            return self.learning_rate
        ratio = self._counted_batch / self.optimizer.reference_batch
        return self.learning_rate * (ratio if rule == "linear" else sqrt(ratio))

    @property
    def _counted_batch(self) -> int:
        """The global batch as the reference batch is given: samples, or tokens with --global-tokens."""
        return self.batch_samples if self.global_tokens is None else self.global_tokens

    @property
    def decays_all(self) -> bool:
        """True if the optimizer itself applies the same weight decay to all parameters."""
        return self.optimizer.decay_norms or self.weight_decay == 0

    @property
    def micro_batch_cap(self) -> int | None:
        """The largest micro-batch the request allows, samples; None if memory alone decides.

        Raises:
            RequestError: a token cap below one sample.
        """
        if self.max_tokens_per_gpu is None:
            return self.micro_batch
        refuse(
            (
                self.max_tokens_per_gpu < self.seq_len,
                f"--max-tokens-per-gpu {self.max_tokens_per_gpu} is less than one sample",
                f"a sample has up to {self.seq_len} tokens",
                f"allow at least {self.seq_len} tokens, or shorten --seq-len",
            )
        )
        most = self.max_tokens_per_gpu // self.seq_len
        return most if self.micro_batch is None else min(most, self.micro_batch)
