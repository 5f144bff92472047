"""Optimizers: the states of each, and how its learning rate follows the batch.

The name says what is computed, the implementation how:

    adamw        fused, foreach, for-loop (torch's own words) or deepspeed: its FusedAdam, and on the host its CPUAdam
    sgd          fused, foreach or for-loop
    adamw-8bit   bitsandbytes, whose moments take a byte each

All implementations of one optimizer compute the same, so there is one flag for each question, and the second can be
left out: torch's fused kernels need no compiler, no library and no temporaries. `deepspeed` compiles its kernels when
they are first used. `foreach` and `for-loop` are for devices or types without a fused kernel, and take temporaries.

The learning rate follows the global batch where the user names the batch that the rate was found for. With kappa =
batch / reference batch:

    linear   rate x kappa         SGD. Goyal et al. 2017, "Accurate, Large Minibatch SGD" (arXiv 1706.02677): one step
                                  over kappa batches goes as far as kappa steps while gradients hardly change between
    sqrt     rate x sqrt(kappa)   Adam and its kin. Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive
                                  Gradient Algorithms" (arXiv 2205.10287): an adaptive step is as long whatever the
                                  gradient's size, so only its noise counts, which falls with sqrt(kappa)

Left out: that Malladi's rule also takes 1 - beta to kappa (1 - beta) and epsilon to epsilon / sqrt(kappa); that both
need a warm-up, and hold up to a batch that depends on the task. The number of GPUs does not occur here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isfinite, log2
from typing import Any, Literal, get_type_hints

from frugal.config.setting import MOST_COUNT, KeyTable
from frugal.errors import refuse

OptimizerName = Literal["adamw", "sgd", "adamw-8bit"]
OptimizerImplementation = Literal["fused", "foreach", "for-loop", "deepspeed"]
OptimizerStates = Literal["fp32", "bf16"]
AccumulationDtype = Literal["fp32", "bf16"]
Rule = Literal["linear", "sqrt"]

_REFUSED = {
    "muon": (
        "updates of DeepSpeed 0.19.8's Muon depend on the number of ranks that gradients are split over: in bf16 under "
        "ZeRO-2, with gradients summed in fp32, those of one rank and of two differ by 95 %, and under ZeRO-3 it "
        "refuses reduce_scatter",
        "use --optimizer adamw",
    )
}
"""Optimizers that people ask for and frugal refuses: why, and what to do (docs/decisions/optimizer-states.md)."""

IMPLEMENTATIONS: dict[OptimizerName, tuple[OptimizerImplementation, ...]] = {
    "adamw": ("fused", "foreach", "for-loop", "deepspeed"),
    "sgd": ("fused", "foreach", "for-loop"),
    "adamw-8bit": (),
}
"""The first is the default; none: there is only the library's own."""

_ADAM = ADAM_BETA1, ADAM_BETA2, ADAM_EPSILON = 0.9, 0.95, 1e-8
"""AdamW's defaults. torch and HF Trainer have 0.999 for the second: a squared gradient then
counts for about 1000 steps, here for 20, so that after a spike of the loss steps are soon as long as before. Language
models are usually trained so: Brown et al. 2020, "Language Models are Few-Shot Learners" (arXiv 2005.14165), appendix
B; Touvron et al. 2023, "LLaMA" (arXiv 2302.13971), section 2.3."""

STATE_BYTES: dict[OptimizerStates, int] = {"fp32": 4, "bf16": 2}
"""Bytes of one master weight, moment or momentum."""

SLOWEST_BETA2_IN_BF16 = 0.99
"""bf16 has 8 significant bits: a decay by less than 1/256 may be rounded away, and one by less than 1/512 is."""

LOW_RATE_IN_BF16 = 3e-4
"""Between 1e-4, where a run was clearly worse than with states in fp32, and 1e-3, where it hardly was
(docs/facts/deepspeed.md)."""

EIGHT_BIT_BLOCK = 256
"""Elements that share one scale, fp32, in each moment of bitsandbytes' 8-bit optimizers."""

SMALLEST_EIGHT_BIT = 4096
"""Elements; bitsandbytes keeps fp32 moments of smaller tensors (`min_8bit_size`)."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer, by name or with keys: `--optimizer adamw,beta2=0.99`, or the table `[optimizer]` of frugal.toml.

    Attributes:
        name: adamw, sgd or adamw-8bit.
        implementation: kernels of the update; None: the first of `IMPLEMENTATIONS`, or its library's only ones.
        states: precision of master weights and optimizer states; None: fp32. bf16 halves their memory, and rounds
            updates below 1/256 of a weight away.
        momentum: of SGD.
        beta1: of AdamW.
        beta2: of AdamW; torch's own default is 0.999.
        epsilon: of AdamW.
        decay_norms: apply weight decay to norms and biases too; HF Trainer does not.
        reference_batch: the global batch that the learning rate was found for: samples, or tokens with --global-tokens.
        lr_rule: how the learning rate scales from the reference batch: linear (for SGD) or sqrt (for Adam).
        gradient_accumulation_dtype: precision of gradients summed over micro-steps. bf16 halves their memory, and loses
            more with every step.
    """

    name: OptimizerName = "adamw"
    implementation: OptimizerImplementation | None = None
    states: OptimizerStates | None = None
    momentum: float = 0.0
    beta1: float = ADAM_BETA1
    beta2: float = ADAM_BETA2
    epsilon: float = ADAM_EPSILON
    decay_norms: bool = True
    reference_batch: int | None = None
    lr_rule: Rule | None = None
    gradient_accumulation_dtype: AccumulationDtype = "fp32"

    def __post_init__(self) -> None:
        known, rule, reference = IMPLEMENTATIONS[self.name], self.lr_rule, self.reference_batch
        below_one = {"momentum": self.momentum, "beta1": self.beta1, "beta2": self.beta2}
        refuse(
            *(
                (
                    not 0 <= value < 1,
                    f"`{key}` of --optimizer is {value:g}",
                    "it must be at least 0, and less than 1, or nothing is forgotten",
                    None,
                )
                for key, value in below_one.items()
            ),
            (
                not (isfinite(self.epsilon) and self.epsilon > 0),
                f"`epsilon` of --optimizer is {self.epsilon:g}",
                "it must be a finite number over 0: a parameter without a gradient is divided by it",
                None,
            ),
            (
                self.implementation is not None and self.implementation not in known,
                f"--optimizer {self.name} has no {self.implementation} implementation",
                f"there is {', '.join(known)}" if known else "there is only that of its library, bitsandbytes",
                "leave `implementation` out",
            ),
            (
                self.momentum and self.name != "sgd",
                f"`momentum` was given with --optimizer {self.name}",
                "only sgd has a momentum to choose",
                "leave one of them out, or use --optimizer sgd",
            ),
            (
                self.name == "sgd" and (self.beta1, self.beta2, self.epsilon) != _ADAM,
                "`beta1`, `beta2` and `epsilon` do not go together with --optimizer sgd",
                "sgd keeps no moments of the gradient; its one number is `momentum`",
                "leave them out, or use --optimizer adamw",
            ),
            (
                self.name == "sgd" and not self.decay_norms,
                "`decay-norms` false is impossible with --optimizer sgd",
                "its weight decay goes through the gradient; only AdamW's can leave parameters out",
                "leave one of them out",
            ),
            (
                self.name == "adamw-8bit" and self.states == "bf16",
                "`states` bf16 is impossible with --optimizer adamw-8bit",
                "it keeps its moments in 8 bits already, and needs master weights in fp32 beside them",
                "leave `states` out",
            ),
            (
                reference is not None and not 1 <= reference <= MOST_COUNT,
                f"`reference-batch` of --optimizer is {reference}",
                f"it must be from 1 to {MOST_COUNT:,}",
                None,
            ),
            (
                reference is not None and rule is None,
                f"`reference-batch` {reference} was given without `lr-rule`",
                "how the learning rate is to follow the batch is not known",
                f"add --set optimizer.lr-rule={self.fitting_rule}, which fits {self.name}",
            ),
            (
                rule is not None and reference is None,
                f"`lr-rule` {rule} was given without `reference-batch`",
                "the batch that the learning rate was found for is not known",
                "add --set optimizer.reference-batch=N, or leave lr-rule out to train with the rate as it is",
            ),
        )

    @classmethod
    def of(cls, value: "str | Mapping[str, Any] | Optimizer") -> "Optimizer":
        """Return the optimizer that a flag, a table of frugal.toml or a caller describes.

        Raises:
            RequestError: a key is unknown or has a wrong value, or keys contradict each other.
        """
        return value if isinstance(value, Optimizer) else cls(**OPTIMIZER.read(value))

    def __str__(self) -> str:
        """The text that `of` reads: the name, and the keys that are not at their defaults."""
        return OPTIMIZER.text(self)

    @property
    def betas(self) -> tuple[float, float]:
        """AdamW's beta1 and beta2."""
        return self.beta1, self.beta2

    @property
    def kernels(self) -> OptimizerImplementation | None:
        """The implementation that runs; None: the library's only one."""
        return self.implementation or next(iter(IMPLEMENTATIONS[self.name]), None)

    @property
    def fitting_rule(self) -> Rule:
        """The rule of the learning rate whose assumptions it meets: all but SGD adapt their steps."""
        return "linear" if self.name == "sgd" else "sqrt"

    @property
    def master_bytes_per_element(self) -> int:
        """Bytes of each master weight."""
        return STATE_BYTES[self.states or "fp32"]

    @property
    def state_bytes_per_element(self) -> float:
        """Bytes of optimizer states per element, without the master weight.

        AdamW: two moments in fp32 or bf16. SGD: its momentum, if any. 8-bit AdamW: two moments of a byte, and two
        scales a block. Left out: parameters below 4096 elements, whose moments bitsandbytes keeps in fp32.
        """
        each = self.master_bytes_per_element
        return {
            "adamw": 2.0 * each,
            "sgd": float(each) if self.momentum else 0.0,
            "adamw-8bit": 2 + 2 * 4 / EIGHT_BIT_BLOCK,
        }[self.name]

    @property
    def can_be_on_host(self) -> bool:
        """True if its states can be in host memory: those in bf16 only with DeepSpeed's own CPU Adam."""
        return self.states != "bf16" or (self.name == "adamw" and self.implementation in (None, "deepspeed"))

    @property
    def why_not_in_part(self) -> tuple[str, str] | None:
        """The key that keeps an update from being split between host and device, and why; None if none does.

        DeepSpeed 0.19.8 takes only its own CPU Adam there, and makes torch's AdamW for the device (stage3.py,
        `__init__`).
        """
        if self.name != "adamw":
            return f"--optimizer {self.name}", "DeepSpeed splits only the work of AdamW"
        if self.implementation not in (None, "deepspeed"):
            return f"`implementation` {self.implementation}", "the host's part is updated by DeepSpeed's own CPU Adam"
        return None


OPTIMIZER = KeyTable(
    flag="--optimizer",
    types=get_type_hints(Optimizer),
    example="adamw,beta2=0.99",
    others={"eps": "epsilon", "adam_beta1": "beta1", "adam_beta2": "beta2", "adam_epsilon": "epsilon"},
    settings={
        "lr": "--learning-rate", "learning_rate": "--learning-rate", "weight_decay": "--weight-decay",
        "max_grad_norm": "--gradient-clipping", "gradient_clipping": "--gradient-clipping",
    },
    refused=_REFUSED,
)  # fmt: skip


def bf16_notes(rate: float, beta2: float) -> list[str]:
    """Return notes on what AdamW with states in bf16 cannot learn at this peak rate and beta2."""
    notes = []
    if beta2 > SLOWEST_BETA2_IN_BF16:
        notes.append(
            f"optimizer.beta2 {beta2:g} with states in bf16: the mean squared gradient never becomes smaller, because "
            f"it would change by less than bf16 can tell; up to {SLOWEST_BETA2_IN_BF16:g} it does"
        )
    if 0 < rate <= LOW_RATE_IN_BF16:
        smallest = 2.0 ** ceil(log2(256 * rate))  # whose neighbours in bf16 are two updates away, or more
        notes.append(
            f"a learning rate of {rate:g} with states in bf16: AdamW moves a weight by about {rate:g}, and an update "
            f"below 1/256 of a weight may round away, so weights above {smallest:.2g} hardly move; at 1e-4 a small "
            "GPT-2 came to a loss of 2.65, with --optimizer adamw-8bit or states in fp32 to 2.22"
        )
    return notes


SOURCES: dict[Rule, str] = {"linear": "Goyal et al. 2017", "sqrt": "Malladi et al. 2022"}
