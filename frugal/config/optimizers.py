"""Optimizers: what each keeps of every parameter, and how its learning rate follows the batch.

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

from frugal.errors import RequestError

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
"""What people ask for and there is not: why, and what to do (docs/decisions/optimizer-states.md)."""

IMPLEMENTATIONS: dict[OptimizerName, tuple[OptimizerImplementation, ...]] = {
    "adamw": ("fused", "foreach", "for-loop", "deepspeed"),
    "sgd": ("fused", "foreach", "for-loop"),
    "adamw-8bit": (),
}
"""The first is taken where none is asked for; none: there is only the library's own."""

ADAM_BETA1, ADAM_BETA2, ADAM_EPSILON = 0.9, 0.95, 1e-8
"""Of every AdamW, unless asked otherwise. torch and HF Trainer have 0.999 for the second: a squared gradient then
counts for about 1000 steps, here for 20, so that after a spike of the loss steps are soon as long as before. Language
models are usually trained so: Brown et al. 2020, "Language Models are Few-Shot Learners" (arXiv 2005.14165), appendix
B; Touvron et al. 2023, "LLaMA" (arXiv 2302.13971), section 2.3."""

STATE_BYTES: dict[OptimizerStates, int] = {"fp32": 4, "bf16": 2}
"""Of one value: a master weight, a moment, a momentum."""

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
    """The implementation of `optimizer` that runs if `asked` is asked for; None: the library's only one."""
    return asked or next(iter(IMPLEMENTATIONS[optimizer]), None)


def state_bytes_per_element(
    optimizer: OptimizerName, momentum: float | None = None, states: OptimizerStates = "fp32"
) -> float:
    """Bytes that the optimizer keeps of each element, without the master weight.

    AdamW: two moments in fp32 or bf16. SGD: its momentum, if any. 8-bit AdamW: two moments of a byte, and two scales a
    block. Left out: parameters below 4096 elements, whose moments bitsandbytes keeps in fp32.
    """
    each = STATE_BYTES[states]
    return {
        "adamw": 2.0 * each,
        "sgd": float(each) if momentum else 0.0,
        "adamw-8bit": 2 + 2 * 4 / EIGHT_BIT_BLOCK,
    }[optimizer]


def check_states(
    states: OptimizerStates | None,
    optimizer: OptimizerName,
    asked: OptimizerImplementation | None,
    *,
    precision: str,
    offload: str,
) -> None:
    """Whether master weights and states can be kept like that.

    DeepSpeed 0.19.8 takes `bf16_master_weights_and_grads` with `bf16_optimizer_states` under ZeRO 1 to 3 for a model in
    bf16 (runtime/config.py), and on the host only with its own CPU Adam (`_configure_master_weights` of
    runtime/base_optimizer.py). The same keys for fp16 need the optimizer on the host, and keep its states in fp32.

    Raises:
        RequestError: they cannot.
    """
    if states != "bf16":
        return
    because, hint = "", "leave --optimizer-states out"
    if precision != "bf16":
        because = "they are rounded to the model's own type"
        hint = "use --precision bf16, or leave --optimizer-states out"
    elif optimizer == "adamw-8bit":
        because = "it keeps its moments in 8 bits already, and needs master weights in fp32 beside them"
    elif offload == "nvme":
        because = "DeepSpeed moves only states in fp32 to disk"
        hint = "use --offload all, or leave --optimizer-states out"
    elif offload in ("optimizer", "all") and not states_can_be_on_host(states, optimizer, asked):
        because = "on the host only DeepSpeed's own CPU Adam keeps states in bf16"
        hint = "use --optimizer adamw without --optimizer-implementation, or leave --optimizer-states out"
    if because:
        what = {"bf16": "", "fp16": " with --precision fp16", "fp32": " with --precision fp32"}[precision]
        what = what or (" with --optimizer adamw-8bit" if optimizer == "adamw-8bit" else f" with --offload {offload}")
        raise RequestError(f"--optimizer-states bf16 is impossible{what}", because=because, hint=hint)


def states_can_be_on_host(
    states: OptimizerStates | None, optimizer: OptimizerName, asked: OptimizerImplementation | None
) -> bool:
    """Whether an optimizer with such states can live in host memory."""
    return states != "bf16" or (optimizer == "adamw" and asked in (None, "deepspeed"))


def why_not_in_part(optimizer: OptimizerName, asked: OptimizerImplementation | None) -> tuple[str, str] | None:
    """What keeps the update from being done partly on the host and partly on the device, and why; None: nothing.

    DeepSpeed 0.19.8 takes only its own CPU Adam there, and makes torch's AdamW for the device (stage3.py, `__init__`).
    """
    if optimizer != "adamw":
        return f"--optimizer {optimizer}", "DeepSpeed splits only the work of AdamW"
    if asked not in (None, "deepspeed"):
        return f"--optimizer-implementation {asked}", "the host's part is updated by DeepSpeed's own CPU Adam"
    return None


def check_ratio(
    ratio: float | None,
    zero_stage: int | None,
    offload: str,
    optimizer: OptimizerName,
    asked: OptimizerImplementation | None,
) -> None:
    """Whether such a share of the optimizer's work can be done in host memory.

    Raises:
        RequestError: it cannot.
    """
    if ratio is None or ratio == 1:
        return
    if not 0 < ratio < 1:
        raise RequestError(
            f"--offload-ratio is {ratio:g}",
            because="it is a share: above 0, and 1 at most",
            hint="leave it out to let frugal decide, or use --offload none to keep the optimizer on the GPUs",
        )
    reason, hint = why_not_in_part(optimizer, asked), "leave --offload-ratio out"
    if zero_stage not in (None, 3):
        reason = f"--zero-stage {zero_stage}", "DeepSpeed splits the optimizer's work only in ZeRO-3"
        hint = "use --zero-stage 3, or leave --offload-ratio out"
    elif offload not in ("auto", "optimizer"):
        reason = f"--offload {offload}", "only the optimizer in host memory can be there in part"
        hint = "use --offload optimizer, or leave --offload-ratio out"
    if reason is not None:
        what, because = reason
        raise RequestError(f"--offload-ratio {ratio:g} is impossible with {what}", because=because, hint=hint)


def bf16_notes(rate: float, beta2: float) -> list[str]:
    """What AdamW with its states in bf16 cannot learn at such a peak rate, and with such a beta2."""
    notes = []
    if beta2 > SLOWEST_BETA2_IN_BF16:
        notes.append(
            f"--adam-beta2 {beta2:g} with states in bf16: the mean squared gradient never becomes smaller, because it "
            f"would change by less than bf16 can tell; up to {SLOWEST_BETA2_IN_BF16:g} it does"
        )
    if 0 < rate <= LOW_RATE_IN_BF16:
        smallest = 2.0 ** ceil(log2(256 * rate))  # whose neighbours in bf16 are two updates away, or more
        notes.append(
            f"a learning rate of {rate:g} with states in bf16: AdamW moves a weight by about {rate:g}, and an update "
            f"below 1/256 of a weight may round away, so weights above {smallest:.2g} hardly move; at 1e-4 a small "
            "GPT-2 came to a loss of 2.65, with --optimizer adamw-8bit or states in fp32 to 2.22"
        )
    return notes


def check(
    optimizer: OptimizerName,
    asked: OptimizerImplementation | None,
    *,
    momentum: float | None,
    betas: tuple[float | None, float | None],
    epsilon: float | None,
    offload: str,
) -> None:
    """Whether these go together.

    Raises:
        RequestError: they do not.
    """
    known = IMPLEMENTATIONS[optimizer]
    if asked is not None and asked not in known:
        raise RequestError(
            f"--optimizer {optimizer} has no {asked} implementation",
            because=f"there is {', '.join(known)}" if known else "there is only that of its library, bitsandbytes",
            hint="leave --optimizer-implementation out",
        )
    if momentum is not None and optimizer != "sgd":
        raise RequestError(
            f"--momentum was given with --optimizer {optimizer}",
            because="only sgd has a momentum to choose",
            hint="leave one of them out, or use --optimizer sgd",
        )
    _check_adam(optimizer, betas, epsilon)
    if optimizer == "adamw-8bit" and offload == "nvme":
        raise RequestError(
            "--optimizer adamw-8bit cannot be used with --offload nvme",
            because="DeepSpeed moves only states in fp32 to disk",
            hint="use --optimizer adamw, or --offload all",
        )


def _check_adam(optimizer: OptimizerName, betas: tuple[float | None, float | None], epsilon: float | None) -> None:
    """Numbers of Adam alone, each in its range.

    Raises:
        RequestError: they are not, or the optimizer is another.
    """
    asked = {"--adam-beta1": betas[0], "--adam-beta2": betas[1], "--adam-epsilon": epsilon}
    given = {flag: value for flag, value in asked.items() if value is not None}
    if given and optimizer == "sgd":
        raise RequestError(
            f"{', '.join(given)} and --optimizer sgd do not go together",
            because="sgd keeps no moments of the gradient; its one number is --momentum",
            hint="leave one of them out, or use --optimizer adamw",
        )
    for flag, value in given.items():
        if flag == "--adam-epsilon" and value == 0:
            raise RequestError(f"{flag} is 0", because="a parameter without a gradient would be divided by zero")
        if flag != "--adam-epsilon" and value >= 1:
            raise RequestError(f"{flag} is {value:g}", because="it must be less than 1, or nothing is ever forgotten")


Rule = Literal["linear", "sqrt"]

_SOURCES = {"linear": "Goyal et al. 2017", "sqrt": "Malladi et al. 2022"}


def fitting(optimizer: str) -> Rule:
    """The rule whose assumptions the optimizer meets: all but SGD adapt their steps."""
    return "linear" if optimizer == "sgd" else "sqrt"


def check_rule(reference_batch: int | None, rule: Rule | None, optimizer: str) -> None:
    """A reference and a rule belong together.

    Raises:
        RequestError: one was given without the other.
    """
    if reference_batch is not None and rule is None:
        raise RequestError(
            f"--reference-batch {reference_batch} was given without --lr-rule",
            because="how the learning rate is to follow the batch is not known",
            hint=f"add --lr-rule {fitting(optimizer)}, which fits {optimizer}",
        )
    if rule is not None and reference_batch is None:
        raise RequestError(
            f"--lr-rule {rule} was given without --reference-batch",
            because="the batch that the learning rate was found for is not known",
            hint="add --reference-batch N, or leave --lr-rule out to train with the rate as it is",
        )


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A `rate` found for `reference_batch`, carried over to `batch`; both in `unit`."""

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
        """That the rule was not made for `optimizer`, and what the other one comes to; None where all is well."""
        right = fitting(optimizer)
        if self.rule == right or self.batch == self.reference_batch:
            return None
        return (
            f"the {self.rule} rule is not made for {optimizer}: with --lr-rule {right} ({_SOURCES[right]}) the "
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
