"""Optimizers by the names of other tools, as the nearest that frugal has."""

from dataclasses import dataclass

from frugal.config.optimizers import OptimizerImplementation, OptimizerName
from frugal.tools.check.documents.document import Place
from frugal.tools.check.settings import Settings


@dataclass(frozen=True)
class _Near:
    """The optimizer that is evaluated instead; `how`: the difference, empty where there is none."""

    optimizer: OptimizerName
    implementation: OptimizerImplementation | None = None
    momentum: float | None = None
    how: str = ""


_PAGED = "its paged states may move to the host where the device is full; they are counted on the device"
_ONE_STATE = "evaluated as SGD with momentum, which also keeps one fp32 tensor of each parameter"

_OF_TRAINER = {
    "adamw_torch": _Near("adamw", "foreach"),
    "adamw_torch_fused": _Near("adamw", "fused"),
    "adamw_apex_fused": _Near("adamw", "fused"),
    "adamw_hf": _Near("adamw", "for-loop"),
    "adamw_torch_8bit": _Near("adamw-8bit", how="evaluated as bitsandbytes', whose moments take a byte each, too"),
    "adamw_bnb_8bit": _Near("adamw-8bit"),
    "adamw_8bit": _Near("adamw-8bit"),
    "paged_adamw": _Near("adamw", "fused", how=_PAGED),
    "paged_adamw_32bit": _Near("adamw", "fused", how=_PAGED),
    "paged_adamw_8bit": _Near("adamw-8bit", how=_PAGED),
    "sgd": _Near("sgd", "foreach"),
    "adagrad": _Near("sgd", "foreach", 0.9, _ONE_STATE),
    "rmsprop": _Near("sgd", "foreach", 0.9, _ONE_STATE),
    "lion_32bit": _Near("sgd", "fused", 0.9, _ONE_STATE),
}
"""transformers' `optim`, which axolotl and LLaMA-Factory pass on."""

_OF_DEEPSPEED = {
    "adam": _Near("adamw", "deepspeed"),
    "adamw": _Near("adamw", "deepspeed"),
    "sgd": _Near("sgd", "foreach"),
    "lamb": _Near("adamw", "deepspeed", how="evaluated as AdamW, which keeps two fp32 tensors a parameter, too"),
    "lion": _Near("sgd", "foreach", 0.9, _ONE_STATE),
    "adagrad": _Near("sgd", "foreach", 0.9, _ONE_STATE),
}


def take(settings: Settings, name: str, place: Place | None, *, of_deepspeed: bool = False) -> None:
    """Set the optimizer of `settings`, or refuse one that resembles none of frugal's."""
    near = (_OF_DEEPSPEED if of_deepspeed else _OF_TRAINER).get(name.lower())
    if near is None:
        settings.refuse(f"the optimizer {name} keeps states that frugal does not know", place)
        return
    settings.optimizer, settings.optimizer_implementation = near.optimizer, near.implementation
    settings.momentum = near.momentum
    if near.how:
        settings.deviate(f"{name}: {near.how}", place)
