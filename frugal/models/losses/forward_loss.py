"""The loss that a module's own forward returns, by whatever names it takes a batch, and whatever else it returns."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from frugal.errors import RequestError


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss in what forward returns for `batch`, shape `()`: the value named `loss`, or the first number.

    Forward gets the values that it has parameters for, by their names; where its only parameter is none of them, the
    batch as it is. Floating-point values are cast to the type of the weights.

    Raises:
        RequestError: forward takes other names, or returns no number with a gradient, or several.
    """
    inner: Any = getattr(model, "module", model) if hasattr(model, "set_gradient_accumulation_boundary") else model
    parameters = inspect.signature(inner.forward).parameters
    dtype = next((each.dtype for each in inner.parameters() if each.is_floating_point()), torch.float32)
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    kinds, lacking = {each.kind for each in parameters.values()}, [n for n in required(inner.forward) if n not in batch]
    takes_it_whole = len(lacking) == 1 == len(parameters)
    if lacking and not takes_it_whole:
        raise RequestError(
            f"{type(inner).__name__}.forward takes `{', '.join(lacking)}`, which samples do not have",
            because=f"it is called with the values of a sample by their names, {', '.join(batch)}",
            hint=f"name them as forward does: {example_in_words(inner)}",
        )
    if takes_it_whole or inspect.Parameter.VAR_POSITIONAL in kinds:
        return _loss_in(inner, model(batch) if takes_it_whole else model(*batch.values()))
    taken = batch if inspect.Parameter.VAR_KEYWORD in kinds else {n: batch[n] for n in batch if n in parameters}
    return _loss_in(inner, model(**taken))


def required(function: Callable[..., Any]) -> list[str]:
    """Return the names of what a function takes and has no default for."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.default is each.empty and each.kind.name[:4] != "VAR_"]


def example_in_words(module: nn.Module) -> str:
    """Return Python of an example of a sample, with the names that forward takes."""
    named = [f'"{each.name}": torch.zeros(SHAPE)' for each in inspect.signature(module.forward).parameters.values()]
    return "{" + ", ".join(named) + "}"


def _loss_in(module: nn.Module, returned: Any) -> Tensor:
    """Return the loss in what a module's forward returned. Raises as `loss_of`."""
    named = returned if isinstance(returned, Mapping) else getattr(returned, "__dict__", {})
    loss = named.get("loss", getattr(returned, "loss", None))
    several = list(returned if isinstance(returned, tuple | list) else named.values() or [returned])
    values = [loss] if isinstance(loss, Tensor) else [returned] if isinstance(returned, Tensor) else several
    numbers = [each for each in values if isinstance(each, Tensor) and not each.dim() and each.is_floating_point()]
    trained = [each for each in numbers if each.requires_grad]
    if numbers and (not torch.is_grad_enabled() or (len(trained) == 1 and trained[0] is numbers[0])):
        return numbers[0]
    shown = [f"a tensor {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__ for each in values]
    raise RequestError(
        f"{type(module).__name__}.forward returns {'several losses' if len(trained) > 1 else 'no loss to train by'}",
        because=f"it returns {', '.join(shown)}; a loss is a number with a gradient: named `loss`, or the first number",
        hint="return it as a tensor, without .item() and .detach()"
        if not trained and (numbers or any(isinstance(each, float) for each in values))
        else "return {'loss': loss.mean()} from forward (of several, their sum), or give "
        "frugal.SummedLoss(loss, example=...)",
    )
