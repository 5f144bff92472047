"""Rows of logits become their gradient in place, rounded once; the tiled loss moves and holds few bytes a logit."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal.dryrun.trace.cuda_kernels import kernels_of
from frugal.dryrun.trace.recorder import Tracker
from frugal.memory_watch import traffic
from frugal.models import tiled_loss
from frugal.models.fused import liger_internals
from frugal.models.losses import cross_entropy
from frugal.units import IGNORED

CLASSES = 1003
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.addmm.dtype_out", "aten.addmm_.default"}


def rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and labels: usual rows, one that is sure and right, one that is sure and wrong, and two without target."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((13, CLASSES), generator=generator) * 3
    labels = torch.randint(0, CLASSES, (13,), generator=generator)
    labels[4] = labels[12] = IGNORED
    logits[2], logits[3], logits[4, 0] = 0.0, 0.0, -torch.inf
    logits[2, labels[2]], logits[3, (labels[3] + 1) % CLASSES] = 12.0, 50.0
    return logits.to(dtype), labels


def of_fp64(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, their sum's gradient, and probabilities; none in rows without target."""
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, labels, ignore_index=IGNORED, reduction="none")
    gradient = torch.autograd.grad(losses.sum(), exact)[0]
    return losses.detach(), gradient, exact.detach().softmax(-1) * (labels != IGNORED)[:, None]


def hold(kernels: Any, ulps: float = 0.51) -> None:
    """Losses are within 1e-6 of fp64's, and each number of the gradient is fp64's, rounded once from fp32, by `ulps`
    at most."""
    for dtype in DTYPES:
        logits, labels = rows(dtype)
        expected, gradient, probabilities = of_fp64(logits, labels)
        in_fp32 = 1e-5 * probabilities  # logits up to 50 have six digits behind the point
        rounded = ulps * torch.finfo(dtype).eps * gradient.abs() + torch.finfo(dtype).smallest_normal
        for with_gradient in (False, True):
            made = logits.clone()
            found = cross_entropy.losses(made, labels, rows_at_once=4, with_gradient=with_gradient, kernels=kernels)
            assert found.dtype == torch.float32
            limits = {"rtol": 1e-6, "atol": 4e-6}  # fp32 of logits up to 50
            torch.testing.assert_close(found.double(), expected, **limits)
            assert found.sum().item() == pytest.approx(expected.sum().item(), rel=1e-6)  # as promised
            assert with_gradient or torch.equal(made[labels != IGNORED], logits[labels != IGNORED])
        assert ((made.double() - gradient).abs() <= in_fp32 + rounded).all()
        assert not made[[4, 12]].any()


def test_losses_and_gradients_are_those_of_fp64_rounded_once() -> None:
    hold("plain")


def test_a_product_is_added_in_fp32_without_rounding_it_first() -> None:
    left, right = torch.randn((64, 30)).bfloat16(), torch.randn((64, 20)).bfloat16()
    total = torch.ones((30, 20))
    cross_entropy.add_product(total, left, right)
    limits = {"rtol": 1e-5, "atol": 1e-5}  # bf16's would be 4e-3
    torch.testing.assert_close(total.double(), 1 + left.double().t() @ right.double(), **limits)


# The loss of a head of 32,000 words in bf16, on meta as on CUDA.

WORDS, WIDTH, LENGTH, SAMPLES = 32_000, 1024, 2048, 4


class Head(nn.Module):
    """A model that is nothing but its output head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        """The only module."""
        return self.head


class Watch(Tracker):
    """Adds up the bytes that are moved beside products, and notes the most that live."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.moved: Counter[str] = Counter()
        self.live = self.most = 0
        self.sizes: dict[int, int] = {}

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Also count."""
        out = super().execute(func, args, kwargs)
        if str(func) not in PRODUCTS:
            self.moved[str(func)] += traffic(func, args, kwargs, out)
        return out

    def born(self, address: int, size_bytes: int, tensor: Tensor, operator: Any) -> None:
        """Count it."""
        self.sizes[address] = size_bytes
        self.live += size_bytes
        self.most = max(self.most, self.live)

    def died(self, address: int, size_bytes: int) -> None:
        """Stop counting it."""
        self.live -= self.sizes.pop(address, 0)


def watched(kernels: Any) -> tuple[Counter[str], int]:
    """Bytes by operator, and the most bytes that live beside the hidden states, the weight and their gradients."""
    with torch.device("meta"):
        model = Head().bfloat16()
        hidden = torch.empty((SAMPLES, LENGTH, WIDTH), dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty((SAMPLES, LENGTH), dtype=torch.int64)
    tiled_loss.apply(model, kernels)
    model.head.forward.targets = targets
    can_launch = patch.object(liger_internals, "can_launch", lambda _: True)  # as in a dry run with Liger installed
    with kernels_of("cuda"), can_launch, Watch() as watch:
        watch.watch(model)
        model.head(hidden).backward()
    return watch.moved, watch.most - hidden.nbytes - 4 * WORDS * WIDTH


@pytest.mark.parametrize(("kernels", "moved", "held"), [("plain", 45, 3.5), ("liger", 25, 2.5)])
def test_few_bytes_of_a_logit_are_moved_and_held(kernels: str, moved: float, held: float) -> None:
    operators, peak = watched(kernels)
    assert sum(operators.values()) < moved * SAMPLES * LENGTH * WORDS
    assert not [name for name in operators if "scatter_add" in name]
    assert peak < held * SAMPLES * LENGTH * WORDS / 4, "of a slice, a quarter of the positions"
