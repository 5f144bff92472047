"""The frozen base that adapters are trained around: checkpoints leave it out and record which one it was.

The record is a digest of 1024 elements of each of its parameters, evenly spaced: another model, another training of the
same, another precision or quantisation have other digests. The same base has the same digest on any layout.
"""

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from frugal.distributed.exchange import gather
from frugal.planning.plan import Plan

MOST_ELEMENTS = 1024
"""Elements of a parameter in the digest."""

_known: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()


def is_left_out(plan: Plan) -> bool:
    """Return whether checkpoints hold adapters only, which `--lora` has put around a base from elsewhere."""
    return plan.request.lora is not None


def digest(engine: Any) -> str | None:
    """Return the SHA-256 of the engine's base; None if checkpoints have it. Collective at its first call."""
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
    """Return the digest of a model that is whole in this process, as if it was trained in `dtype`."""
    frozen = {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return of_samples(
        {
            name: (tuple(p.shape), [_sampled(p.data.view(-1), 0, p.numel(), dtype if p.is_floating_point() else None)])
            for name, p in frozen.items()
        }
    )


def of_samples(samples: dict[str, tuple[tuple[int, ...], list[bytes]]]) -> str:
    """Return the digest of parameters, from the shape of each and the bytes of its elements, in consecutive parts."""
    total = hashlib.sha256()
    for name, (shape, parts) in sorted(samples.items()):
        total.update(f"{name} {shape}\n".encode())
        total.update(b"".join(parts))
    return total.hexdigest()


def _sampled(elements: Tensor, first: int, number: int, dtype: torch.dtype | None = None) -> bytes:
    """Return the sampled ones of `elements`, shape `(elements,)`, which begin with element `first` of a parameter."""
    step = max(1, number // MOST_ELEMENTS)
    start = -first % step
    return elements[start::step].to("cpu", dtype, copy=True).contiguous().view(torch.uint8).numpy().tobytes()
