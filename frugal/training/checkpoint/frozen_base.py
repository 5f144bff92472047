"""The base that adapters are trained around: frozen, so that checkpoints leave it out and say which one it was.

It is told by a digest of 1024 elements of each of its parameters, evenly spaced: another model, another training of the
same, another precision or quantisation have others. The same base has the same digest on any layout.
"""

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from frugal.distributed.exchange import gather
from frugal.planning.plan import Plan

MOST_ELEMENTS = 1024
"""Of a parameter, in the digest."""

_known: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()


def is_left_out(plan: Plan) -> bool:
    """Whether checkpoints hold adapters alone: where `--lora` has put them around a base that comes from elsewhere."""
    return plan.request.lora is not None


def digest(engine: Any) -> str | None:
    """SHA-256 of the engine's base; None where it is not left out of checkpoints. Collective at its first call."""
    if not is_left_out(engine.plan):
        return None
    if engine not in _known:
        _known[engine] = _digest(engine)
    return _known[engine]


def _digest(engine: Any) -> str:
    frozen = {name: p for name, p in engine.module.named_parameters() if not p.requires_grad}
    sizes = {name: engine.zero.shape(parameter) for name, parameter in frozen.items()}
    own = dict.fromkeys(frozen, b"")
    for piece, elements in engine.zero.frozen_elements():
        own[piece.name] = _sampled(elements, piece.first, torch.Size(sizes[piece.name]).numel())
    of_ranks = gather(own, dict[str, bytes], engine.votes)
    is_split = engine.plan.strategy.zero_stage == 3
    return of_samples(
        {name: (sizes[name], [each[name] for each in of_ranks][: None if is_split else 1]) for name in frozen}
    )


def of_module(module: nn.Module, dtype: torch.dtype) -> str:
    """The digest of a model that is whole in this process, as it would be if it was trained in `dtype`."""
    frozen = {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return of_samples(
        {
            name: (tuple(p.shape), [_sampled(p.data.view(-1), 0, p.numel(), dtype if p.is_floating_point() else None)])
            for name, p in frozen.items()
        }
    )


def of_samples(samples: dict[str, tuple[tuple[int, ...], list[bytes]]]) -> str:
    """The digest of parameters: of each its shape and the bytes of its elements, in parts that follow each other."""
    total = hashlib.sha256()
    for name, (shape, parts) in sorted(samples.items()):
        total.update(f"{name} {shape}\n".encode())
        total.update(b"".join(parts))
    return total.hexdigest()


def _sampled(elements: Tensor, first: int, number: int, dtype: torch.dtype | None = None) -> bytes:
    """The sampled ones among `elements`, shape `(elements,)`, which begin with element `first` of a parameter's."""
    step = max(1, number // MOST_ELEMENTS)
    start = -first % step
    return elements[start::step].to("cpu", dtype, copy=True).contiguous().view(torch.uint8).numpy().tobytes()
