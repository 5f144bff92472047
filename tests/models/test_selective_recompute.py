"""Selective activation checkpointing keeps expensive results, and what it returns is what would be computed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from frugal.models import activation_checkpointing

Layer = Callable[[Tensor, Tensor], Tensor]


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(F.gelu(x @ weight) @ weight)


def written_before_it_is_read(x: Tensor, weight: Tensor) -> Tensor:
    """As ZeRO-3's linear layers add their bias, twice and in part."""
    y = x @ weight
    y += weight[0]
    y.view(-1, 16)[:, :4].mul_(2)
    return F.gelu(y) @ weight


def read_and_then_written(x: Tensor, weight: Tensor) -> Tensor:
    y = x @ weight
    total = y.sigmoid().sum(0)
    y += total
    return F.gelu(y) * total


def several_written_at_once(x: Tensor, weight: Tensor) -> Tensor:
    y, z = x @ weight, torch.ones_like(x)
    torch._foreach_add_([y, z], [weight[0], weight[1]])
    return F.gelu(y) * z.tanh()


def returned_and_used(x: Tensor, weight: Tensor) -> Tensor:
    y = x @ weight
    torch.tanh_(y)
    return y


def with_dropout(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(F.gelu(F.dropout(x @ weight, 0.5)) @ weight, 0.5)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(F.conv1d(x.unsqueeze(1), weight[:, :3].unsqueeze(1))).sum(1)


def attended(x: Tensor, weight: Tensor) -> Tensor:
    query, key = (F.gelu(x @ weight).view(1, 2, -1, 8) for _ in range(2))
    return F.scaled_dot_product_attention(query, key, key, is_causal=True).view(-1, 16).tanh()


LAYERS = (
    plain, written_before_it_is_read, read_and_then_written, several_written_at_once, returned_and_used, with_dropout,
    convolved, attended,
)  # fmt: skip


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(8, 16, generator=generator), torch.randn(16, 16, generator=generator)
    return x.requires_grad_(), weight.requires_grad_()


def gradients(layer: Layer, *, selective: bool, after: Callable[[Tensor], Tensor] = torch.clone) -> list[Tensor]:
    x, weight = inputs()
    torch.manual_seed(1)
    out = x * 1
    for _ in range(2):
        if selective:
            out = checkpoint(layer, out, weight, use_reentrant=False, context_fn=activation_checkpointing.contexts)
        else:
            out = layer(out, weight)
        out = after(out)
    out.square().sum().backward()
    assert x.grad is not None and weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_and_gradients_are_the_same_to_the_bit(layer: Layer) -> None:
    for kept, computed in zip(gradients(layer, selective=True), gradients(layer, selective=False), strict=True):
        assert torch.equal(kept, computed)


def test_a_result_that_is_changed_after_its_layer_is_computed_again() -> None:
    results: list[Tensor] = []

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        results.append(x @ weight)
        return results[-1].sin()

    def change(out: Tensor) -> Tensor:
        results.pop().detach().zero_()
        return out.clone()

    kept = gradients(layer, selective=True, after=change)
    assert all(map(torch.equal, kept, gradients(layer, selective=False)))


@pytest.mark.parametrize("layer", [plain, convolved, attended, written_before_it_is_read])
def test_what_is_expensive_is_not_computed_again(layer: Layer) -> None:
    def flops(selective: bool) -> int:
        with FlopCounterMode(display=False) as counter:
            gradients(layer, selective=selective)
        return int(counter.get_total_flops())

    assert flops(selective=True) == flops(selective=False) > 0


def test_a_second_backward_finds_the_same_gradients() -> None:
    x, weight = inputs()
    out = checkpoint(plain, x, weight, use_reentrant=False, context_fn=activation_checkpointing.contexts)
    first = torch.autograd.grad(out.sum(), (x, weight), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out.sum(), (x, weight))))


def test_attention_with_dropout_is_computed_again_because_it_draws_random_numbers() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    query = torch.zeros(1, 1, 8, 8, device="meta")
    assert activation_checkpointing._draws(flash, (query, query, query, 0.1), {})
    assert activation_checkpointing._draws(flash, (query, query, query), {"dropout_p": 0.1})
    assert not activation_checkpointing._draws(flash, (query, query, query), {})
    assert not activation_checkpointing._draws(torch.ops.aten.mm.default, (query, query), {})
