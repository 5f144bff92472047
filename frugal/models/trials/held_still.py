"""Trials hold random draws still, and what modules keep from one forward to the next."""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from frugal.units import IGNORED

Kept = list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]


def kept_by(module: nn.Module) -> Kept:
    """Return what a module keeps between forwards: each place, its values, and copies of those that can change."""
    return [
        (
            place,
            dict(place),
            {
                name: value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
                for name, value in place.items()
                if not (place is vars(module) and name.startswith("_"))
                and isinstance(value, Tensor | bool | int | float | list | deque)
            },
        )
        for place in (module._parameters, module._buffers, vars(module))
    ]


def kept(model: nn.Module) -> dict[str, Kept]:
    """Return what each module keeps, by its name."""
    return {name: kept_by(module) for name, module in model.named_modules()}


def put(module: nn.Module, kept: Kept) -> None:
    """Have a module keep what it kept."""
    with torch.no_grad():
        for place, values, copies in kept:
            place.clear()
            place.update(values)
            for name, was in copies.items():
                if isinstance(was, Tensor) and place[name].shape == was.shape:
                    place[name].data.copy_(was)
                elif isinstance(was, Tensor):
                    place[name].data = was.clone()
                elif isinstance(was, list | deque):
                    place[name] = copy.copy(was)


def differs(before: Kept, after: Kept) -> bool:
    """Tell whether a module keeps other values; a parameter that an optimizer moves is not among them."""
    return any(
        one.keys() != other.keys() or any(not _is_same(value, other[name]) for name, value in one.items())
        for (_, _, one), (_, _, other) in zip(before, after, strict=True)
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, list | deque) and isinstance(other, list | deque):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and (one is other or (isinstance(one, bool | int | float) and one == other))


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Leave behind the parameters, buffers and other values of `model` that were there."""
    values, modules = kept(model), dict(model.named_modules())
    try:
        yield
    finally:
        for name, each in values.items():
            put(modules[name], each)


class FixedDraws(TorchFunctionMode):
    """Every random draw gives the number below which `share` of all draws are, dropout its input.

    `has_dropout`: whether that would have been another. `has_draws`: whether more than one number was drawn at once.
    `left_out`: what cross entropies took for no target.
    """

    has_dropout = has_draws = False

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.left_out: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self.has_dropout |= bool(_argument(args, kwargs, 4, 0.0, "dropout_p"))
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            return func(*args, **(kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {})))
        if "dropout" in name:
            is_training = _argument(args, kwargs, 2, True, "training", "train")
            self.has_dropout |= bool(is_training and _argument(args, kwargs, 1, 0.5, "p"))
            return args[0] if args else kwargs["input"]
        if name in ("cross_entropy", "nll_loss"):
            self.left_out.add(_argument(args, kwargs, 4, IGNORED, "ignore_index"))
        if name == "ctc_loss" and not 0 <= args[1].min() <= args[1].max() < args[0].shape[-1]:
            raise IndexError("a target is none of the classes")  # torch writes beyond its memory instead
        if name == "multinomial":
            return _argument(args, kwargs, 0, None, "input").topk(_argument(args, kwargs, 1, 1, "num_samples")).indices
        result = func(*args, **kwargs)
        if name in _DRAWS:
            self.has_draws |= result.numel() > 1
            result.copy_(_DRAWS[name](self.share, result, *args, **kwargs))
        return result


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, default: Any, *names: str) -> Any:
    """Return the argument of a torch function for a parameter that is spelt in one of several ways."""
    return args[index] if index < len(args) else next((kwargs[name] for name in names if name in kwargs), default)


def _normal(share: float, mean: Any = 0.0, std: Any = 1.0) -> Any:
    """Return nearly the number below which `share` of a normal distribution is."""
    return torch.as_tensor(mean) + 3 * (2 * share - 1) * torch.as_tensor(std)


def _uniform(share: float, low: Any = 0.0, high: Any = 1.0, **named: Any) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)
    return torch.tensor(low + share * (high - low))


def _whole(share: float, *bounds: Any, **named: Any) -> Tensor:
    """Return what `torch.randint` gives, of its arguments."""
    low, high = (0, *(each for each in bounds if isinstance(each, int)))[-2:]
    low, high = named.get("low", low), named.get("high", high)
    return torch.tensor(low + int(share * (high - low)))


_DRAWS: dict[str, Callable[..., Tensor]] = {
    "rand": lambda share, *_, **__: torch.tensor(share),
    "rand_like": lambda share, *_, **__: torch.tensor(share),
    "randn": lambda share, *_, **__: _normal(share),
    "randn_like": lambda share, *_, **__: _normal(share),
    "uniform_": lambda share, _, __, *bounds, **named: _uniform(share, *bounds, **named),
    "normal_": lambda share, _, __, mean=0.0, std=1.0, **___: _normal(share, mean, std),
    "normal": lambda share, _, mean, std=1.0, *__, **___: _normal(share, mean, std),
    "exponential_": lambda share, _, __, lambd=1.0, **___: torch.tensor(2 * share / lambd),
    "bernoulli": lambda share, _, p, *__, **___: p > share,
    "bernoulli_": lambda share, _, __, p=0.5, **___: torch.as_tensor(p) > share,
    "randint": lambda share, _, *bounds, **named: _whole(share, *bounds, **named),
    "randint_like": lambda share, _, __, *bounds, **named: _whole(share, *bounds, **named),
    "randperm": lambda _, result, *__, **___: torch.arange(len(result)).flip(0),
    "poisson": lambda _, __, rate, *___: rate,
    "_standard_gamma": lambda _, __, alpha, *___: alpha,
    "_sample_dirichlet": lambda _, __, alpha, *___: alpha / alpha.sum(-1, keepdim=True),
}
"""Functions from the share, the real draw and the arguments of a torch function to what is drawn."""


@contextmanager
def without_randomness(share: float | None = 0.5) -> Iterator[None]:
    """Take random numbers out of forwards inside the `with` block: samples alone make their outputs.

    Draws are what `share` of all draws are below, 0.5 makes them their means; None: they are real, of the same seed.
    What cannot be replaced is drawn from the same seed. Generators are left as they were.
    """
    states = random.getstate(), np.random.get_state()

    def filled(size: Any = None, low: float = 0.0, high: float = 1.0) -> Any:
        value = low + share * (high - low)  # type: ignore[operator]  # not called where it is None
        return value if size is None or size == () else np.full(size, value)

    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # models draw from the global one
        if share is not None:
            of_numpy: dict[str, Any] = {
                "random": filled,
                "random_sample": filled,
                "rand": lambda *size: filled(size),
                "uniform": lambda low=0.0, high=1.0, size=None: filled(size, low, high),
            }
            of_python: dict[str, Any] = {"random": filled, "uniform": lambda low, high: filled(None, low, high)}
            stack.enter_context(patch.multiple(random, **of_python))
            stack.enter_context(patch.multiple(np.random, **of_numpy))
            stack.enter_context(FixedDraws(share))
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
