"""Autocast for meta tensors, equal to that of a GPU.

torch's own autocast keeps its state as usual: whether it is on, the type, the depth. Its casts of operators' inputs
are written in C++ for tensors of a GPU only, so they are registered here for meta tensors, at the same dispatch key. It
runs above autograd: casts have gradients. The lists are those of torch/include/ATen/autocast_mode.h and of
`TORCH_LIBRARY_IMPL(aten, AutocastCUDA)`; a test holds them to the installed torch.

A cast weight is kept until the outermost `with torch.autocast` ends (`cached_cast` in autocast_mode.cpp): with fp32
weights the half-precision copies of all of them live through forward, and those that autograd saved through backward.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from frugal import torch_internals

LOWER_PRECISION = (
    "_convolution", "_convolution.deprecated", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d",
    "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
    "cudnn_convolution", "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot", "linalg_vecdot",
    "linear", "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell",
    "scaled_dot_product_attention",
)  # fmt: skip
"""Operators that run in autocast's type."""

FLOAT = (
    "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh",
    "cosine_embedding_loss", "cosine_similarity", "dist", "erfinv", "exp", "expm1", "frobenius_norm.dim", "group_norm",
    "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2",
    "logsumexp", "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "native_layer_norm",
    "nll_loss", "nll_loss2d", "nuclear_norm", "nuclear_norm.dim", "pdist", "poisson_nll_loss", "pow.Scalar",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "renorm", "rms_norm", "rsqrt", "sinh", "smooth_l1_loss",
    "soft_margin_loss", "softplus", "tan", "triplet_margin_loss", "upsample_bicubic2d", "upsample_bilinear2d",
    "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
)  # fmt: skip
"""Operators that run in fp32."""

FLOAT_RESULT = (
    "cumprod", "cumsum", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm", "log_softmax.int",
    "prod", "prod.dim_int", "softmax.int", "sum", "sum.dim_IntList",
)  # fmt: skip
"""Operators that return fp32 where no type is asked for."""

FLOAT_NORMS = ("norm.Scalar", "norm.ScalarOpt_dim")
"""Norms that return fp32 through an overload that takes a type."""

WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot",
    "vdot",
)  # fmt: skip
"""Operators that run in the widest type of their inputs."""

REFUSED = ("binary_cross_entropy",)

aten = torch.ops.aten
Kernel = Callable[..., Any]


class Autocast:
    """The casts of autocast, and its cache of cast weights."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # id of a weight -> itself, and its cast

    def forget(self) -> None:
        """Clear the cache, at the end of the outermost autocast."""
        self._kept.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast the eligible tensors in an operator's argument to `dtype`."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.cast(each, dtype) for each in value)
        if not _is_eligible(value) or value.dtype == dtype:
            return value
        is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf
        keeps = torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
        if not is_weight or dtype != lower_precision() or not keeps:
            return value.to(dtype)
        kept = self._kept.get(id(value))
        if kept is None or kept[0]() is not value:
            kept = self._kept[id(value)] = weakref.ref(value), value.to(dtype)
        return kept[1]

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        """Yield each operator's kernel under autocast; it runs with autocast switched off."""
        makers: tuple[tuple[Sequence[str], Callable[[Any], Kernel]], ...] = (
            (LOWER_PRECISION, partial(self._cast_to, lambda _: lower_precision())),
            (FLOAT, partial(self._cast_to, lambda _: torch.float32)),
            (FLOAT_RESULT, _with_float_result),
            (FLOAT_NORMS, lambda _: _norm),
            (WIDEST, partial(self._cast_to, _widest)),
            (REFUSED, lambda _: _refused),
        )
        for names, make in makers:
            for name in names:
                packet, _, overload = name.partition(".")
                yield name, _below_autocast(make(getattr(getattr(aten, packet), overload or "default")))

    def _cast_to(self, dtype: Callable[[tuple[Any, ...]], torch.dtype], operator: Any) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            to = dtype(args)
            kwargs = {name: self.cast(value, to) for name, value in kwargs.items()}
            # in the order in which the compiler of torch's wheels evaluates arguments
            cast = [self.cast(value, to) for value in reversed(args)]
            return operator(*reversed(cast), **kwargs)

        return kernel


def lower_precision() -> torch.dtype:
    """Return autocast's type."""
    return torch.get_autocast_dtype("cuda")


def _is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta and value.is_floating_point() and value.dtype != torch.float64


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    eligible = [tensor.dtype for tensor in torch_internals.tensors_in(args) if _is_eligible(tensor)]
    return torch.float32 if torch.float32 in eligible else lower_precision()


def _with_float_result(operator: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        value = args[0]
        names_a_type = kwargs.get("dtype") is not None or any(isinstance(each, torch.dtype) for each in args[1:])
        if _is_eligible(value) and not names_a_type:
            kwargs["dtype"] = torch.float32
        return operator(*args, **kwargs)

    return kernel


def _norm(value: Tensor, p: Any = 2, dim: Any = (), keepdim: bool = False) -> Tensor:
    dtype = torch.float32 if _is_eligible(value) else value.dtype
    return aten.norm.ScalarOpt_dim_dtype(value, p, dim, keepdim, dtype=dtype)


def _refused(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; "
        "use binary_cross_entropy_with_logits"
    )


@contextmanager
def on_meta() -> Iterator[Autocast]:
    """Make `torch.autocast("cuda")` act on meta tensors inside the `with` block."""
    autocast = Autocast()
    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        autocast.forget()
        clear()

    try:
        with (
            torch_internals.with_kernels(torch_internals.AUTOCAST, autocast.kernels()),
            torch_internals.autocast_on_every_tensor(),
            patch.object(torch, "clear_autocast_cache", clear_all),
        ):
            yield autocast
    finally:
        autocast.forget()


def _below_autocast(kernel: Kernel) -> Kernel:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch_internals.without_autocast():
            return kernel(*args, **kwargs)

    return call
