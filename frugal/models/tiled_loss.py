"""Cross entropy without the logits of a whole batch in memory.

The logits of a vocabulary of 128k and 4,096 tokens are 2.1 GB in fp32, and backward needs them two more times. Here
the head runs on a slice of the sequence at a time and its gradient is taken on the spot, so that one slice of logits
exists at once. The incoming gradient is a scalar and is applied in backward, so any later scaling (W / T, fp16 loss
scale) stays exact. The idea is that of Liger Kernel's fused linear cross entropy (Hsu et al., 2024, arXiv:2410.10989).
A slice's logits become their own gradient in place, by torch's operators or Liger's kernel (`losses/cross_entropy.py`).

What a model does to its logits after the head, a soft cap, a scale or a bias, is applied to each slice in the model's
own precision: its copy on meta, without its layers, runs on two tokens, and every operator that the head's result
passes is noted (`tiling/positions.py`). The same operators are applied to a slice: the result is that of the whole, bit
for bit. Refused are ends that are not elementwise, change logits in place, draw random numbers, or use a parameter (its
gradient would be lost, and ZeRO-3 has not gathered it in the head).

Cost: one buffer of the head's size in fp32, in which products add its gradient up, and none of the logits.

The loss runs inside the head module's own forward, because that is where ZeRO-3 has its weight gathered.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal import torch_internals
from frugal.errors import RequestError
from frugal.models.losses import cross_entropy, predictions
from frugal.models.tiling import positions, slices
from frugal.planning.strategy import Kernels

MIN_SLICES_A_BYTE = 2
"""The least number of slices for each byte of a logit: a slice's logits take at most a quarter of the bytes that all
of them would in half precision."""

CHUNKS = 8
"""Parts of a slice of which one at a time is in fp32, where no kernel computes rows by itself ..."""

CHUNK_LOGITS = 1 << 18
"""... and the logits of a sample that one has at least."""


def apply(model: nn.Module, kernels: Kernels = "plain") -> None:
    """Replace the forward of the model's output head by the tiled loss, whose rows `kernels` compute.

    Raises:
        RequestError: the model has no linear output head, or what it does to its logits cannot be done to a slice.
    """
    head = _head(model)
    if head is None:
        raise _refusal(model, "it has no linear output head (get_output_embeddings() gives none)")
    try:
        finish = logits_end(model)
    except positions.PositionsMeetError as error:
        raise _refusal(model, f"{_CHANGED}: {error}") from None
    head.forward = _TiledHead(head, finish, kernels)  # type: ignore[method-assign, assignment]  # ZeRO-3's hooks still run


def is_supported(model: nn.Module) -> bool:
    """Return whether `apply` would work; whether the model changes its logits after the head, only a forward shows."""
    return _head(model) is not None


def applied_to(model: nn.Module) -> "_TiledHead | None":
    """Return the forward of the output head of this model, or of the model inside this DeepSpeed engine, if `apply` was
    called on it."""
    forward: Any = getattr(_head(model), "forward", None)
    return forward if isinstance(forward, _TiledHead) else None


def is_applied(model: nn.Module) -> bool:
    """Return whether `apply` was called on this model, or on the model inside this DeepSpeed engine."""
    return applied_to(model) is not None


def outputs_with_sum(model: nn.Module, inputs: dict[str, Any], targets: Tensor) -> Any:
    """Return `model(**inputs)`, whose logits are the loss summed over `targets (samples, positions)`, fp32, shape `()`.

    Raises:
        RequestError: the model changes its logits after the head in a way that was not observed.
    """
    tiled = applied_to(model)
    assert tiled is not None
    tiled.targets = targets
    inner: nn.Module = getattr(model, "module", model)
    try:
        with tiled.hooks_on(inner):
            outputs = model(**inputs)
        if tiled.loss is None or torch_internals.address(outputs.logits) != torch_internals.address(tiled.loss):
            raise _refusal(model, _CHANGED)
        return outputs
    except IndexError:  # it takes some of the logits, and the loss has none
        if tiled.loss is None:
            raise
        raise _refusal(model, _CHANGED) from None
    finally:
        tiled.targets = tiled.loss = None


_CHANGED = "it changes its logits after the output head"


def _refusal(model: nn.Module, because: str) -> RequestError:
    name = type(getattr(model, "module", model)).__name__
    return RequestError(f"{name} cannot take the tiled loss", because=because, hint="plan with the plain loss")


def _head(model: nn.Module) -> nn.Linear | None:
    inner: Any = getattr(model, "module", model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    return head if isinstance(head, nn.Linear) else None


def logits_end(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return what `model` does to its logits `(samples, positions, classes)` after its head; None: nothing.

    None also where it does not run on meta; `outputs_with_sum` checks what it then returns. The model is not changed,
    and may be on any device, also with parameters that ZeRO-3 has divided.

    Raises:
        PositionsMeetError: the model's logits are no elementwise function of its head's.
    """
    for without_layers in (True, False):
        try:
            return _observed_end(model, positions.meta_copy(model, without_layers=without_layers))
        except positions.PositionsMeetError:
            raise
        except Exception:  # whatever a model trips over on meta
            continue
    return None


def _observed_end(model: nn.Module, copied: Any) -> Callable[[Tensor], Tensor] | None:
    """Note what `copied`, the model's copy on meta, does to what its head returns. Raises as `logits_end`."""
    vars(copied).pop("forward", None)  # one put over the class's, as TRL does, runs the model it was made for
    for config in (copied.config, copied.config.get_text_config()):
        config.output_router_logits = False  # no layers, no routers; what they add to the loss is another matter
    head = copied.get_output_embeddings()
    inputs = {"input_ids": torch.zeros((1, 2), dtype=torch.int64, device="meta")}
    if getattr(copied.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch_internals.without_modes(), torch.no_grad():
        follower = positions.Follower(copied, is_elementwise=True)
        shape = 1, positions.NUM_POSITIONS, head.out_features
        head.forward = lambda hidden: follower.follow(hidden.new_empty(shape))
        with follower:
            ended = copied(**inputs).logits
    if id(ended) not in follower.followed:
        raise positions.PositionsMeetError("they are made of something else")
    first, buffers = next(iter(follower.followed)), {id(buffer): name for name, buffer in copied.named_buffers()}

    def finish(logits: Tensor) -> Tensor:
        values = {first: logits}

        def value(argument: Any) -> Any:
            if not isinstance(argument, Tensor):
                return argument
            if id(argument) in buffers:
                return model.get_buffer(buffers[id(argument)])
            return values[id(argument)] if id(argument) in values else argument.item()

        for operator, arguments, options, out in follower.steps:
            given = {name: value(option) for name, option in options.items()}
            values[id(out)] = operator(*map(value, arguments), **given)
        return values[id(ended)]

    return finish if id(ended) != first else None


class _TiledHead:
    """A head's forward that takes hidden states and returns the summed loss instead of logits.

    `finish`: what the model does to its logits `(samples, positions, classes)` after the head; None: nothing.
    """

    def __init__(self, head: nn.Linear, finish: Callable[[Tensor], Tensor] | None, kernels: Kernels) -> None:
        self.head = head
        self.finish = finish
        self.kernels = kernels
        self.targets: Tensor | None = None
        self.loss: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        assert self.targets is not None, "the tiled head only knows the loss; it was called for logits"
        how = self.finish, torch.is_grad_enabled(), self.kernels
        loss: Tensor = _TiledCrossEntropy.apply(hidden, self.head.weight, self.head.bias, self.targets, *how)
        self.loss = loss
        return loss if self.finish is None else loss.view(1, 1, 1)  # the model's end may take slices of it

    @contextmanager
    def hooks_on(self, model: nn.Module) -> Iterator[None]:
        """Have `model` return the loss that its head did, though its end is applied to it as to logits.

        The head's as it leaves the hooks of ZeRO-3 on the head, and before it enters those on the model.
        """
        if self.finish is None:
            yield
            return

        def leaves(_head: nn.Module, _inputs: Any, loss: Tensor) -> None:
            self.loss = loss.view(())

        def returns(_model: nn.Module, _inputs: Any, outputs: Any) -> None:
            outputs.logits = self.loss

        with self.head.register_forward_hook(leaves), model.register_forward_hook(returns, prepend=True):
            yield


class _TiledCrossEntropy(torch.autograd.Function):
    """`hidden (samples, positions, width)`, `weight (classes, width)`, `bias (classes) | None` -> loss `()`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        finish: Callable[[Tensor], Tensor] | None,
        in_training: bool,
        kernels: Kernels,
    ) -> Tensor:
        need_hidden, need_weight, need_bias = (needed and in_training for needed in ctx.needs_input_grad[:3])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and need_bias else None
        with_gradient = need_hidden or need_weight or grad_bias is not None
        num_samples, num_positions, model_width = hidden.shape
        width = slices.length(num_positions, model_width, MIN_SLICES_A_BYTE * weight.element_size())
        rows_at_once = num_samples * max(-(-width // CHUNKS), -(-CHUNK_LOGITS // len(weight)))
        for start in slices.starts(hidden, 1, width):
            tile = hidden[:, start : start + width].reshape(-1, model_width)
            labels = targets[:, start : start + width].contiguous()
            logits, pull_back = F.linear(tile, weight, bias), None
            if finish is not None:
                logits, pull_back = _finished(logits, finish, num_samples, with_gradient)
            predictions.show(logits.view(*labels.shape, -1), labels)
            labels = labels.view(-1)
            total += cross_entropy.losses(
                logits, labels, rows_at_once=rows_at_once, with_gradient=with_gradient, kernels=kernels
            ).sum()
            if with_gradient:
                gradient = logits if pull_back is None else pull_back(logits)
                if grad_bias is not None:
                    grad_bias += gradient.sum(0, dtype=torch.float32)
                if grad_hidden is not None:
                    of_tile = grad_hidden[:, start : start + width]
                    of_tile.copy_((gradient @ weight).view_as(of_tile))
                if grad_weight is not None:
                    cross_entropy.add_product(grad_weight, gradient, tile)
                del gradient
            del logits, pull_back, tile  # the next one takes their place
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grads
        saved = (None if saved is None else saved * scale.to(saved.dtype) for saved in ctx.saved_tensors)
        return (*saved, None, None, None, None)


def _finished(
    raw: Tensor, finish: Callable[[Tensor], Tensor], num_samples: int, in_training: bool
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return `raw (tokens, classes)` after the model's end, writable, and a function from its gradient to `raw`'s."""
    with torch.set_grad_enabled(in_training):
        raw.requires_grad_(in_training)
        ended = finish(raw.view(num_samples, -1, raw.shape[-1]))

    def pull_back(gradient: Tensor) -> Tensor:
        gradient = gradient.to(ended.dtype).view_as(ended)
        return torch.autograd.grad(ended, raw, gradient)[0]

    # logits are made the gradient in place, and what the end keeps for its backward may be the same tensor
    logits = ended.detach().view_as(raw)
    return logits.clone() if in_training else logits, pull_back
