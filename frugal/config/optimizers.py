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

from dataclasses import dataclass
from math import ceil, log2, sqrt
from typing import Literal

OptimizerName = Literal["adamw", "sgd", "adamw-8bit"]
OptimizerImplementation = Literal["fused", "foreach", "for-loop", "deepspeed"]
OptimizerStates = Literal["fp32", "bf16"]

REFUSED = {
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

ADAM_BETA1, ADAM_BETA2, ADAM_EPSILON = 0.9, 0.95, 1e-8
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


def implementation(optimizer: OptimizerName, asked: OptimizerImplementation | None) -> OptimizerImplementation | None:
    """Return the implementation that runs if `asked` is asked for; None: the library's only one."""
    return asked or next(iter(IMPLEMENTATIONS[optimizer]), None)


def state_bytes_per_element(
    optimizer: OptimizerName, momentum: float | None = None, states: OptimizerStates = "fp32"
) -> float:
    """Return the bytes of optimizer states per element, without the master weight.

    AdamW: two moments in fp32 or bf16. SGD: its momentum, if any. 8-bit AdamW: two moments of a byte, and two scales a
    block. Left out: parameters below 4096 elements, whose moments bitsandbytes keeps in fp32.
    """
    each = STATE_BYTES[states]
    return {
        "adamw": 2.0 * each,
        "sgd": float(each) if momentum else 0.0,
        "adamw-8bit": 2 + 2 * 4 / EIGHT_BIT_BLOCK,
    }[optimizer]


def states_can_be_on_host(
    states: OptimizerStates | None, optimizer: OptimizerName, asked: OptimizerImplementation | None
) -> bool:
    """Return True if an optimizer with such states can be in host memory."""
    return states != "bf16" or (optimizer == "adamw" and asked in (None, "deepspeed"))


def why_not_in_part(optimizer: OptimizerName, asked: OptimizerImplementation | None) -> tuple[str, str] | None:
    """Return the setting that keeps an update from being split between host and device, and why; None if none does.

    DeepSpeed 0.19.8 takes only its own CPU Adam there, and makes torch's AdamW for the device (stage3.py, `__init__`).
    """
    if optimizer != "adamw":
        return f"--optimizer {optimizer}", "DeepSpeed splits only the work of AdamW"
    if asked not in (None, "deepspeed"):
        return f"optimizer.implementation {asked}", "the host's part is updated by DeepSpeed's own CPU Adam"
    return None


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


Rule = Literal["linear", "sqrt"]

_SOURCES = {"linear": "Goyal et al. 2017", "sqrt": "Malladi et al. 2022"}


def fitting(optimizer: str) -> Rule:
    """Return the rule whose assumptions the optimizer meets: all but SGD adapt their steps."""
    return "linear" if optimizer == "sgd" else "sqrt"


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A learning rate found for `reference_batch` and scaled to `batch`; both in `unit`."""

    rate: float
    rule: Rule
    batch: int
    reference_batch: int
    unit: Literal["samples", "tokens"]

    @property
    def scaled(self) -> float:
        """The rate for `batch`."""
        return self._by(self.rule)

    def note(self, optimizer: str) -> str | None:
        """Return a note if the rule was not made for `optimizer`, with the rate of the one that was."""
        right = fitting(optimizer)
        if self.rule == right or self.batch == self.reference_batch:
            return None
        return (
            f"the {self.rule} rule is not made for {optimizer}: with optimizer.lr-rule {right} ({_SOURCES[right]}) the "
            f"learning rate would be {self._by(right):g}"
        )

    def __str__(self) -> str:
        ratio = f"{self.batch}/{self.reference_batch}"
        ratio = f"sqrt({ratio})" if self.rule == "sqrt" else ratio
        basis = f"{self.rule} rule, from {self.reference_batch} {self.unit}"
        return f"{self.scaled:g} = {self.rate:g} x {ratio} ({basis})"

    def _by(self, rule: Rule) -> float:
        factor = self.batch / self.reference_batch
        return self.rate * (factor if rule == "linear" else sqrt(factor))
