"""Cross entropy without the logits of a whole batch in memory.

The logits of a vocabulary of 128k and 4,096 tokens are 2.1 GB in fp32, and backward needs them two more times. Here
the head runs on a slice of the sequence at a time and its gradient is taken on the spot, so that one slice of logits
exists at once. The incoming gradient is a scalar and is applied in backward, so any later scaling (W / T, fp16 loss
scale) stays exact. The idea is that of Liger Kernel's fused linear cross entropy (Hsu et al., 2024, arXiv:2410.10989)
in plain PyTorch.

Cost: one buffer of the head's size in fp32, in which its gradient is summed, and none of the logits.
Left out: heads whose logits are changed afterwards (soft caps, logit scales); `summed_cross_entropy` refuses them.

The loss runs inside the head module's own forward, because that is where ZeRO-3 has its weight gathered.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal import torch_internals
from frugal.errors import RequestError
from frugal.training.losses import predictions

NUM_TILES = 8
IGNORED = predictions.IGNORED


def apply(model: nn.Module) -> None:
    """Replace the forward of the model's output head by the tiled loss.

    Raises:
        RequestError: the model has no linear output head.
    """
    head = _head(model)
    if head is None:
        raise RequestError(
            f"{type(model).__name__} cannot take the tiled loss",
            because="it has no linear output head (get_output_embeddings() gives none)",
            hint="plan with the plain loss",
        )
    head.forward = _TiledHead(head)  # type: ignore[method-assign, assignment]  # ZeRO-3's hooks on the module still run


def is_supported(model: nn.Module) -> bool:
    """Whether `apply` would work. A model may still change its logits after the head; only a forward shows that."""
    return _head(model) is not None


def is_applied(model: nn.Module) -> bool:
    """Whether `apply` was called on this model, or on the model inside this DeepSpeed engine."""
    head = _head(model)
    return head is not None and isinstance(head.forward, _TiledHead)


def summed_cross_entropy(model: nn.Module, inputs: dict[str, Any], targets: Tensor) -> Tensor:
    """The loss summed over `targets` of shape `(samples, positions)`, fp32, shape `()`.

    Raises:
        RequestError: the model changes its logits after the head.
    """
    loss: Tensor = outputs_with_sum(model, inputs, targets).logits
    return loss


def outputs_with_sum(model: nn.Module, inputs: dict[str, Any], targets: Tensor) -> Any:
    """What `model(**inputs)` returns; its logits are the loss summed over `targets`, see `summed_cross_entropy`."""
    head = _head(model)
    assert head is not None
    tiled = head.forward
    assert isinstance(tiled, _TiledHead)
    tiled.targets = targets
    changed = RequestError(
        f"{type(getattr(model, 'module', model)).__name__} cannot take the tiled loss",
        because="it changes its logits after the output head",
        hint="plan with the plain loss",
    )
    try:
        outputs = model(**inputs)
        if tiled.loss is None or torch_internals.address(outputs.logits) != torch_internals.address(tiled.loss):
            raise changed
        return outputs
    except IndexError:  # it takes some of the logits, and the loss has none
        if tiled.loss is None:
            raise
        raise changed from None
    finally:
        tiled.targets = tiled.loss = None


def _head(model: nn.Module) -> nn.Linear | None:
    inner: Any = getattr(model, "module", model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    return head if isinstance(head, nn.Linear) else None


class _TiledHead:
    """Stands for `head.forward`: takes hidden states, returns the summed loss instead of logits."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.targets: Tensor | None = None
        self.loss: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        assert self.targets is not None, "the tiled head only knows the loss; it was called for logits"
        arguments = (hidden, self.head.weight, self.head.bias, self.targets, torch.is_grad_enabled())
        loss: Tensor = _TiledCrossEntropy.apply(*arguments)
        self.loss = loss
        return loss


class _TiledCrossEntropy(torch.autograd.Function):
    """`hidden (samples, positions, width)`, `weight (classes, width)`, `bias (classes) | None` -> loss `()`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, in_training: bool
    ) -> Tensor:
        need_hidden, need_weight, need_bias = (needed and in_training for needed in ctx.needs_input_grad[:3])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and need_bias else None
        width = -(-hidden.shape[1] // NUM_TILES)
        for start in range(0, hidden.shape[1], width):
            tile = hidden[:, start : start + width].reshape(-1, hidden.shape[-1])
            labels = targets[:, start : start + width].reshape(-1, 1)
            kept = labels != IGNORED
            classes = labels.clamp_min(0)
            logits = F.linear(tile, weight, bias).float()
            predictions.show(logits.view(*targets[:, start : start + width].shape, -1), labels.view(len(targets), -1))
            of_target = logits.gather(1, classes)
            largest = logits.amax(-1, keepdim=True)
            logits.sub_(largest).exp_()  # in place: torch's logsumexp would take as much again
            exp_sum = logits.sum(-1, keepdim=True)
            total += ((largest + exp_sum.log() - of_target) * kept).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            # d loss / d logits = softmax - one-hot on targets, 0 elsewhere; built in place of the logits
            logits.div_(exp_sum).scatter_add_(1, classes, torch.full_like(exp_sum, -1.0)).mul_(kept)
            if grad_bias is not None:
                grad_bias += logits.sum(0)
            grad_logits = logits.to(hidden.dtype)
            del logits
            if grad_hidden is not None:
                grad_hidden[:, start : start + width] = (grad_logits @ weight).view_as(hidden[:, start : start + width])
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ tile
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grads
        return (*(None if saved is None else saved * scale.to(saved.dtype) for saved in ctx.saved_tensors), None, None)
