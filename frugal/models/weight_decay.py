"""Weight decay that leaves norms and biases out, as HF Trainer's does, in one parameter group.

ZeRO keeps the parameters of a group end to end in one flat tensor, so two groups would be two sets of flat tensors,
buckets and padding, another memory than was planned. Instead DeepSpeed's optimizer gets no decay, and right before its
step the elements that decay are multiplied in place by 1 - rate x decay: what AdamW does first (Loshchilov and Hutter
2019, arXiv 1711.05101), with no memory, and one more pass over them. Left out: SGD, whose decay goes through the
gradient and its momentum; it is refused.
"""

from typing import Any

import torch

from frugal.config.request import Request
from frugal.deepspeed_adapter.stages import Zero


class PartialDecay:
    """Weight decay of a part of the elements that `zero`'s inner optimizer is about to update."""

    def __init__(self, zero: Zero, request: Request) -> None:
        self._inner, self._decay = zero.inner, request.weight_decay
        self._decayed: dict[int, list[tuple[int, int]]] | None = None
        if request.decays_all:
            return
        from transformers import Trainer

        # none of LayerNorm, and none with norm or bias in the name; it does not look at itself
        names = set(Trainer.get_decay_parameter_names(None, zero.engine.module))
        self._decayed = {
            id(flat): [(piece.place, piece.place + piece.number) for piece in pieces if piece.name in names]
            for flat, pieces in zip(zero.flat_tensors(), zero.layout().slots, strict=True)
        }
        for group in zero.inner.param_groups:
            group["weight_decay"] = 0.0

    def apply(self) -> None:
        """Decay what is in the optimizer's groups now, before its step: ZeRO-3 puts one sub-group there at a time."""
        if self._decayed is None:
            return
        with torch.no_grad():
            for group in self._inner.param_groups:
                for flat in group["params"]:
                    if flat.grad is None:  # not used, at stage 0
                        continue
                    elements: Any = flat.data.view(-1)
                    for begin, end in self._decayed[id(flat)]:
                        elements[begin:end].mul_(1 - group["lr"] * self._decay)
