"""The cross entropy of each row of logits, with its gradient in place of the logits.

Both ways compute in fp32, whatever the logits are in. Bytes moved a logit in half precision, products apart:

| way     | runs                                                                              | bytes | memory besides |
|---------|-----------------------------------------------------------------------------------|-------|----------------|
| `plain` | torch's log-softmax of some rows in fp32, whose exponential is rounded into place |    24 | 8 for a row    |
| `liger` | one Triton kernel of Liger Kernel: two reads and one write (arXiv:2410.10989)     |     6 | none           |

Left out: a log-softmax of long rows reads them more than once.

The gradient at the target is `exp(x) - 1` of its log-probability, rounded once: the difference of a rounded probability
and 1 would be lost where the model is sure.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from frugal.models.fused import liger_internals
from frugal.planning.strategy import Kernels
from frugal.units import IGNORED

meta_stands_for = "cpu"
"""The kind of device whose kernels meta tensors are to take: a dry run sets it."""


def losses(
    logits: Tensor, labels: Tensor, *, rows_at_once: int, with_gradient: bool, kernels: Kernels = "plain"
) -> Tensor:
    """Return the loss of each row of `logits (rows, classes)`, fp32; 0 where `labels (rows)` are `IGNORED`.

    `with_gradient`: the logits become the gradient of the sum of the losses; else those of rows without target may
    change. `rows_at_once`: in fp32 at a time.
    """
    row_losses = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    if kernels == "liger" and liger_internals.can_launch(logits):
        torch.ops.frugal.cross_entropy_(logits, labels, row_losses, with_gradient)
        return row_losses
    ignored, classes = (labels == IGNORED)[:, None], labels.clamp_min(0)[:, None]
    for start in range(0, len(logits), rows_at_once):
        rows = slice(start, start + rows_at_once)
        _plain(logits[rows], classes[rows], ignored[rows], row_losses[rows, None], with_gradient)
    return row_losses


def _plain(logits: Tensor, classes: Tensor, ignored: Tensor, row_losses: Tensor, with_gradient: bool) -> None:
    """Write the losses of some rows to `row_losses`, and if asked their gradient to `logits`; all `(rows, ...)`."""
    log_probabilities = F.log_softmax(logits.float(), -1)
    of_target = log_probabilities.gather(1, classes)
    row_losses.copy_(of_target).neg_().masked_fill_(ignored, 0)
    if with_gradient:
        torch.exp(log_probabilities, out=logits)
        logits.scatter_(1, classes, of_target.expm1_().to(logits.dtype)).masked_fill_(ignored, 0)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left.T @ right` to `total`, fp32, without rounding the product to half precision.

    CUDA sums in fp32 inside the product; elsewhere the factors are copied to fp32, unless they are.
    """
    takes_cuda = left.is_cuda or (left.is_meta and meta_stands_for == "cuda")
    if takes_cuda and left.dtype == right.dtype and left.element_size() == 2:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.t().float(), right.float())


def _launch(logits: Tensor, labels: Tensor, row_losses: Tensor, with_gradient: bool) -> Tensor:
    """Launch Liger's kernel, a program a row, with the settings of Liger's `cross_entropy_forward` for a plain sum."""
    module, num_classes = liger_internals.library().cross_entropy, logits.shape[-1]
    is_blackwell = logits.is_cuda and torch.cuda.get_device_capability(logits.device)[0] >= 10
    module.liger_cross_entropy_kernel[(len(logits),)](
        X_ptr=logits, X_stride=logits.stride(0), Y_ptr=labels, Y_stride=labels.stride(0),
        loss_ptr=row_losses, loss_stride=1, n_cols=num_classes, ignore_index=IGNORED, reduction="sum",
        HAS_GRADIENTS=with_gradient, BLOCK_SIZE=min(module.MAX_FUSED_SIZE, 1 << (num_classes - 1).bit_length()),
        weight_ptr=None, z_loss_ptr=None, token_accuracy_ptr=None, token_accuracy_stride=0, predicted_tokens_ptr=None,
        predicted_tokens_stride=0, n_non_ignore=1, sum_non_ignore_weight=1, weight_sum=0.0, lse_square_scale=0.0,
        label_smoothing=0.0, softcap=None, RETURN_Z_LOSS=False, RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False, HAS_WEIGHT=False, HAS_SOFTCAPPING=False,
        num_warps=8 if is_blackwell and logits.element_size() == 2 else 32,
    )  # fmt: skip
    return logits


# The launch is an operator, so that a dry run sees it and on meta nothing is launched.
_LIBRARY = torch.library.Library("frugal", "FRAGMENT")  # its operators go with it
_LIBRARY.define(
    "cross_entropy_(Tensor(a!) logits, Tensor labels, Tensor(b!) row_losses, bool with_gradient) -> Tensor(a!)"
)
_LIBRARY.impl("cross_entropy_", _launch, "CUDA")
_LIBRARY.impl("cross_entropy_", _launch, "CPU")  # by Triton's interpreter
_LIBRARY.impl("cross_entropy_", lambda logits, *_: logits, "Meta")
