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
from typing import TYPE_CHECKING, Literal

from frugal.errors import refuse

if TYPE_CHECKING:
    from frugal.config.request import Request

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


def check(request: "Request") -> None:
    """Check that optimizer, implementation, states and their numbers go together.

    DeepSpeed 0.19.8 takes `bf16_master_weights_and_grads` with `bf16_optimizer_states` under ZeRO 1 to 3 for a model in
    bf16 (runtime/config.py), and on the host only with its own CPU Adam (`_configure_master_weights` of
    runtime/base_optimizer.py). The same keys for fp16 need the optimizer on the host, and keep its states in fp32.

    Raises:
        RequestError: they do not.
    """
    optimizer, asked, offload = request.optimizer, request.optimizer_implementation, request.offload
    known, rule, reference = IMPLEMENTATIONS[optimizer], request.lr_rule, request.reference_batch
    betas = {"optimizer.beta1": request.adam_beta1, "optimizer.beta2": request.adam_beta2}
    of_adam = [
        name for name, value in (betas | {"optimizer.epsilon": request.adam_epsilon}).items() if value is not None
    ]
    refuse(
        (
            asked is not None and asked not in known,
            f"--optimizer {optimizer} has no {asked} implementation",
            f"there is {', '.join(known)}" if known else "there is only that of its library, bitsandbytes",
            "leave optimizer.implementation out",
        ),
        (
            request.momentum is not None and optimizer != "sgd",
            f"optimizer.momentum was given with --optimizer {optimizer}",
            "only sgd has a momentum to choose",
            "leave one of them out, or use --optimizer sgd",
        ),
        (
            of_adam and optimizer == "sgd",
            f"{', '.join(of_adam)} and --optimizer sgd do not go together",
            "sgd keeps no moments of the gradient; its one number is optimizer.momentum",
            "leave one of them out, or use --optimizer adamw",
        ),
        (
            request.adam_epsilon == 0,
            "optimizer.epsilon is 0",
            "a parameter without a gradient would be divided by zero",
            None,
        ),
        *(
            (
                beta is not None and beta >= 1,
                f"{name} is {beta}",
                "it must be less than 1, or nothing is forgotten",
                None,
            )
            for name, beta in betas.items()
        ),
        (
            optimizer == "adamw-8bit" and offload == "nvme",
            "--optimizer adamw-8bit cannot be used with --offload nvme",
            "DeepSpeed moves only states in fp32 to disk",
            "use --optimizer adamw, or --offload all",
        ),
        (
            request.decay_norms is False and optimizer == "sgd",
            "optimizer.decay-norms false is impossible with --optimizer sgd",
            "its weight decay goes through the gradient; only AdamW's can leave parameters out",
            "leave one of them out",
        ),
        (
            reference is not None and rule is None,
            f"optimizer.reference-batch {reference} was given without optimizer.lr-rule",
            "how the learning rate is to follow the batch is not known",
            f"add --set optimizer.lr-rule={fitting(optimizer)}, which fits {optimizer}",
        ),
        (
            rule is not None and reference is None,
            f"optimizer.lr-rule {rule} was given without optimizer.reference-batch",
            "the batch that the learning rate was found for is not known",
            "add --set optimizer.reference-batch=N, or leave lr-rule out to train with the rate as it is",
        ),
    )
    if request.optimizer_states == "bf16":
        _check_bf16_states(request)
    if request.offload_ratio not in (None, 1):
        _check_ratio(request)


def _check_bf16_states(request: "Request") -> None:
    what, hint = "--optimizer-states bf16 is impossible with ", "leave --optimizer-states out"
    optimizer, offload = request.optimizer, request.offload
    on_host = offload in ("optimizer", "all")
    refuse(
        (
            request.precision != "bf16",
            f"{what}--precision {request.precision}",
            "they are rounded to the model's own type",
            f"use --precision bf16, or {hint}",
        ),
        (
            optimizer == "adamw-8bit",
            f"{what}--optimizer adamw-8bit",
            "it keeps its moments in 8 bits already, and needs master weights in fp32 beside them",
            hint,
        ),
        (
            offload == "nvme",
            f"{what}--offload nvme",
            "DeepSpeed moves only states in fp32 to disk",
            f"use --offload all, or {hint}",
        ),
        (
            on_host and not states_can_be_on_host("bf16", optimizer, request.optimizer_implementation),
            f"{what}--offload {offload}",
            "on the host only DeepSpeed's own CPU Adam keeps states in bf16",
            f"use --optimizer adamw without optimizer.implementation, or {hint}",
        ),
    )


def _check_ratio(request: "Request") -> None:
    """Check that a share of the update can be done in host memory."""
    ratio, stage = request.offload_ratio or 0.0, request.zero_stage
    what = f"--offload optimizer:{ratio:g} is impossible with"
    reason, because = why_not_in_part(request.optimizer, request.optimizer_implementation) or ("", "")
    refuse(
        (
            not 0 < ratio < 1,
            f"--offload optimizer:{ratio:g} has no share of the update",
            "it must be above 0, and 1 at most",
            "use --offload optimizer to let frugal decide, or --offload none to keep the optimizer on the GPUs",
        ),
        (
            stage not in (None, 3),
            f"{what} --zero-stage {stage}",
            "DeepSpeed splits the optimizer's work only in ZeRO-3",
            "use --zero-stage 3, or --offload optimizer",
        ),
        (reason, f"{what} {reason}", because, "use --offload optimizer"),
    )


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
