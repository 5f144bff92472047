"""The trained model, as others load it: a folder for `from_pretrained`, or one file of weights for any module."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
from torch import Tensor, nn

from frugal.errors import CheckpointError
from frugal.training.agreement import RanksFailed, together
from frugal.training.manifest import put_in_place

if TYPE_CHECKING:
    from frugal.training.engine import Engine


def save_model(engine: "Engine", folder: Path, tokenizer: Any = None) -> Path:
    """Write the model in the precision it was trained in, and the tokenizer, to `folder`. Collective.

    A transformers model becomes what `from_pretrained` loads; any other module a `model.safetensors` for
    `load_state_dict`. An earlier model in `folder` is replaced at the end, not before.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    folder = folder.absolute()
    aside = folder.with_name(folder.name + ".tmp")
    weights = _whole_weights(engine.module, keep=engine.rank == 0)
    try:
        together(lambda: _write(engine.module, weights, aside, tokenizer) if engine.rank == 0 else None, engine.votes)
    except RanksFailed as failed:
        if engine.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"cannot write the model to {folder}", because=failed.reasons, hint="make room, then continue with --resume"
        ) from None
    return folder


def _whole_weights(module: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Parameters and buffers by name, on the host, tied ones shared; empty unless `keep`. Collective.

    ZeRO-3 gathers one parameter at a time, so no device ever holds more than the largest beside its share.
    """
    weights: dict[str, Tensor] = {}
    parameters: dict[int, Tensor] = {}
    for parameter in module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            if keep:
                parameters[id(parameter)] = parameter.detach().to("cpu", copy=True)
    if keep:
        for name, tensor in module.state_dict(keep_vars=True).items():
            weights[name] = parameters[id(tensor)] if id(tensor) in parameters else tensor.detach().to("cpu", copy=True)
    return weights


def _write(module: nn.Module, weights: dict[str, Tensor], aside: Path, tokenizer: Any) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        if hasattr(module, "save_pretrained"):
            module.save_pretrained(aside, state_dict=weights)  # type: ignore[operator]  # a transformers model
        else:
            from safetensors.torch import save_file

            save_file({name: tensor.clone() for name, tensor in weights.items()}, aside / "model.safetensors")
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
    except Exception as error:  # safetensors has its own error for a full disk, tokenizers theirs
        raise OSError(None, f"{type(error).__name__}: {error}") from error
    put_in_place(aside)
