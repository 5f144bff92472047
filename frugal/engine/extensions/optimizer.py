"""The user's own optimizer, and settings of an optimizer by parameter.

    def make(groups):                              # a list of dicts, as torch's optimizers take them
        return torch.optim.NAdam(groups, lr=2e-4)

    initialize(model, plan, objective, optimizer=make,
               parameter_groups={"*.bias": {"weight_decay": 0.0}, "head.*": {"lr": 1e-3}})

ZeRO hands an optimizer the parameters of a group end to end in flat tensors, of which each rank has a part. So only
optimizers that update each element independently train the same on any number of ranks: that is tried on a small
tensor, cut and whole, before training, and others (LAMB, Adafactor, Muon) are refused from stage 1 on. The bytes that
it keeps of each element are measured there, too, and compared with the plan, which counted another optimizer.

A group is a flat tensor of its own. The plan leaves out its padding, 2 elements a rank at most, and that buckets and
ZeRO-3's sub-groups are cut elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from frugal.deepspeed_adapter.stages import Zero
from frugal.errors import PlanMismatchError, RequestError, refuse
from frugal.planning.plan import Plan
from frugal.units import format_bytes

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Settings = Mapping[str, Any]
ParameterGroups = Mapping[str, Settings] | Callable[[str, nn.Parameter], Settings | None]
"""Settings by a pattern of names (`*.bias`; the first that matches counts), or a function of name and parameter."""

_TRIED = (96, 64)
"""Shape of the parameter that an optimizer is tried on, large enough for states in blocks."""
_NUM_STEPS = 2


@dataclass(frozen=True)
class OwnOptimizer:
    """The optimizer that the user asks for beside the plan.

    Attributes:
        make: makes the optimizer of parameter groups; None: the plan's.
        groups: the model's trained parameters with settings of each group.
        name: its class, as a checkpoint calls it; None: the plan's.
    """

    make: MakeOptimizer | None
    groups: list[dict[str, Any]]
    name: str | None

    @classmethod
    def of(
        cls, model: nn.Module, plan: Plan, make: MakeOptimizer | None, groups: ParameterGroups | None
    ) -> "OwnOptimizer | None":
        """Return the optimizer; None if neither it nor groups are asked for.

        Raises:
            RequestError: a pattern matches nothing, or the optimizer cannot be trained with on several ranks.
            PlanMismatchError: it needs more memory than the plan leaves.
        """
        if make is None and groups is None:
            return None
        strategy, is_own = plan.strategy, make is not None
        refuse(
            (
                not plan.request.decays_all,
                "optimizer.decay-norms = false was planned, and the optimizer's groups are given",
                "each group says its own weight decay",
                'plan without it, and give a group {"weight_decay": 0.0}',
            ),
            (
                is_own and strategy.offload_ratio < 1,
                "an optimizer of your own cannot have its states partly in host memory",
                "DeepSpeed splits only the work of AdamW",
                "plan with --offload optimizer:1",
            ),
            (
                is_own and (strategy.offload_optimizer == "nvme" or plan.request.optimizer.states == "bf16"),
                "an optimizer of your own cannot have its states on NVMe, or in bf16",
                "that is known only of those that are planned",
                "plan without it",
            ),
        )
        return cls(make, _grouped(model, groups or {}), None if make is None else _checked(make, plan))

    def settings(self, zero: Zero) -> list[dict[str, Any]]:
        """Return the settings of each group of the optimizer, without the effect of a schedule."""
        return [
            {
                name: group.get("initial_lr", value) if name == "lr" else value
                for name, value in group.items()
                if name not in ("params", "initial_lr")
            }
            for group in zero.inner.param_groups
        ]


def _grouped(model: nn.Module, groups: ParameterGroups) -> list[dict[str, Any]]:
    """Group the trained parameters by their settings, in the model's order."""
    made: list[dict[str, Any]] = []
    used: set[str | None] = set()
    for name, parameter in ((name, each) for name, each in model.named_parameters() if each.requires_grad):
        if callable(groups):
            settings = dict(groups(name, parameter) or {})
        else:
            pattern = next((each for each in groups if fnmatchcase(name, each)), None)
            settings = dict(groups[pattern]) if pattern is not None else {}
            used.add(pattern)
        same = next((group for group in made if group["settings"] == settings), None)
        if same is None:
            made.append(same := {"settings": settings, "params": []})
        same["params"].append(parameter)
    unused = [] if callable(groups) else [pattern for pattern in groups if pattern not in used]
    if unused:
        raise RequestError(
            f"no trained parameter is called like `{unused[0]}`",
            because="each pattern of parameter_groups must be the first that matches some parameter",
            hint=f"names are like `{next(iter(dict(model.named_parameters())))}`",
        )
    return [{"params": group["params"], **group["settings"]} for group in made]


def _checked(make: MakeOptimizer, plan: Plan) -> str:
    """Try the optimizer, and return its class.

    Raises:
        RequestError: it does not update each element independently, as ZeRO needs it.
        PlanMismatchError: it keeps more than the plan leaves free.
    """
    whole, state_bytes, name = _tried(make, [_TRIED])
    elements = whole.numel()
    if plan.strategy.zero_stage:
        try:
            cut, *_ = _tried(make, [(elements // 3,), (elements - elements // 3,)])
        except Exception as error:  # whatever an optimizer says of a tensor that is no matrix
            raise _not_by_element(name, str(error).splitlines()[0]) from None
        if not torch.allclose(whole, cut, rtol=1e-4, atol=1e-7):
            raise _not_by_element(name, "the same gradient cut in two parts gives other weights than in one")
    planned = plan.request.optimizer.state_bytes_per_element
    ranks = plan.batch.world_size if plan.strategy.zero_stage else 1
    more = (state_bytes / elements - planned) * plan.model.trainable_parameters / ranks
    if plan.strategy.offload_optimizer == "none" and more > plan.memory.headroom_bytes:
        raise PlanMismatchError(
            f"{name} needs more memory than was planned",
            because=f"it keeps {state_bytes / elements:g} bytes of each element and {plan.request.optimizer.name} "
            f"{planned:g}: {format_bytes(int(more))} more on a rank, of which "
            f"{format_bytes(plan.memory.headroom_bytes)} are free",
            hint="plan for a smaller --mem, so that as much stays free",
        )
    return name


def _not_by_element(name: str, reason: str) -> RequestError:
    return RequestError(
        f"{name} cannot be trained with under ZeRO",
        because=["ZeRO cuts parameters into flat parts, so each element must be updated independently", reason],
        hint="plan with --zero-stage 0 --precision fp32, or use another optimizer",
    )


def _tried(make: MakeOptimizer, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, int, str]:
    """Return elements after a few steps of one parameter in parts of these shapes, bytes of states, and the class."""
    generator = torch.Generator().manual_seed(0)
    size = _TRIED[0] * _TRIED[1]
    start = torch.randn(size, generator=generator)
    gradients = [torch.randn(size, generator=generator) for _ in range(_NUM_STEPS)]
    numbers = [torch.Size(shape).numel() for shape in shapes]

    def cut(elements: Tensor) -> list[Tensor]:
        return [part.reshape(shape).clone() for part, shape in zip(elements.split(numbers), shapes, strict=True)]

    parameters = [nn.Parameter(part) for part in cut(start)]
    optimizer = make([{"params": parameters}])
    for gradient in gradients:
        for parameter, part in zip(parameters, cut(gradient), strict=True):
            parameter.grad = part
        optimizer.step()
    kept = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.numel() > 1
    ]
    state_bytes = sum(value.numel() * value.element_size() for value in kept)
    return torch.cat([parameter.detach().flatten() for parameter in parameters]), state_bytes, type(optimizer).__name__
