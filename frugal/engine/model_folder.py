"""A model folder from any checkpoint, without its ranks: in one process, on the CPU, in the memory of the model.

The files of all ranks are mapped into memory, and each parameter is assembled from its pieces, see `loading`. Adapters
are written as adapters, or merged into their base, which is then built with its weights and must be the one that they
were trained around. A quantised base is unpacked for merging, in the run's precision, as the adapters saw it, and not
packed again, which would round away part of what was trained.
"""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frugal import file_errors, files
from frugal.checkpoint import frozen_base, loading, manifest, other_states, saving
from frugal.config.run_settings import RunSettings, earlier_settings
from frugal.config.setting import build
from frugal.data import corpus
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.engine.evaluation import Criterion
from frugal.errors import CheckpointError, PlanMismatchError, failure, refuse
from frugal.models.loading import quantised
from frugal.models.resolve import resolve_request
from frugal.models.spec import ModelSpec
from frugal.planning.plan import Plan

PLAN = "plan.json"
LAST, BEST = "last", "best"


@dataclass(frozen=True)
class Run:
    """A checkpoint with the plan and the settings of its run."""

    plan: Plan
    settings: RunSettings
    path: Path
    made_by: manifest.Manifest


def find(given: Path, which: str | None) -> Path:
    """Return the checkpoint `given`, or one in the folder of a run or of its checkpoints.

    `which`: `last`, `best`, or the number of a step; None: the last.

    Raises:
        RequestError: there is no such folder, or it cannot be chosen from.
        CheckpointError: there is no such checkpoint.
    """
    is_one = (given / manifest.MANIFEST).is_file()
    refuse(
        (
            is_one and which is not None,
            f"--step {which} was given for one checkpoint",
            f"{given} is one",
            "give the run's folder",
        ),
        (not given.is_dir(), f"there is no run in {given}", "", "give the folder of a run, or a checkpoint in it"),
    )
    if is_one:
        return given
    folder = given / "checkpoints" if (given / "checkpoints").is_dir() else given
    there = manifest.checkpoints_in(folder)
    if not there:
        raise CheckpointError(f"there is no checkpoint in {folder}", hint="give the --out of a run that saved one")
    reason = f"there is no checkpoint of step {which} in {folder}"
    if which == BEST:
        settings = build(RunSettings, earlier_settings(folder.parent))
        chosen = saving.best_of(there, Criterion.of(settings.best, settings.metric).score)
        reason = f"no checkpoint in {folder} was evaluated"
    else:
        name = there[0].name if which in (None, LAST) else f"step-{which:0>6}"
        chosen = next((path for path in there if path.name == name), None)
    if chosen is None:
        names = ", ".join(sorted(path.name for path in there))
        raise CheckpointError(reason, because=f"there are {names}", hint=f"use --step {LAST}, {BEST}, or one of these")
    return chosen


def write(checkpoint: Path, out: Path, *, merge: bool = False) -> str:
    """Write the model of `checkpoint` to the folder `out`, with its tokenizer, and return what it is, in words.

    `merge`: merge adapters into their base, in the base's own precision, or in the run's if the base is quantised.

    Raises:
        RequestError: `out` exists, there is nothing to merge, or model or tokenizer cannot be made.
        CheckpointError: the checkpoint is damaged, not of a run, or `out` cannot be written.
        PlanMismatchError: model or base have changed.
    """
    refuse((out.exists(), f"{out} is there already", "", "choose another folder with -o"))
    run = _run_of(checkpoint)
    is_adapter = run.plan.request.lora is not None
    refuse(
        (
            merge and not is_adapter,
            "--merge was given for a run without adapters",
            f"{run.plan.request.model} was trained itself",
            "leave it out",
        )
    )
    spec = resolve_request(run.plan.request)
    own: Any = getattr(spec.config, "dtype", None) if spec.weights else None  # of pretrained weights, before building
    own = getattr(torch, own, None) if isinstance(own, str) else own
    is_kept = isinstance(own, torch.dtype) and not spec.quantize
    dtype: torch.dtype = own if is_kept else DTYPES[run.plan.request.precision]
    tokenizer, _ = corpus.tokenizer_for(spec, run.settings.tokenizer, run.settings.chat_template)
    with other_states.named(checkpoint):
        saved = loading.Saved(checkpoint, run.made_by, DTYPES[run.plan.request.optimizer.states or "fp32"])
        spec, module = _empty(spec.for_tokenizer(tokenizer), run, saved)
        weights = _weights(module, saved)
    kind = f"the adapters of step {run.made_by.step}, whose base is {spec.weights or spec.reference}"
    if merge:
        module = _merged(spec, run, weights, dtype)
        weights = {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}
        precision = str(next(module.parameters()).dtype).removeprefix("torch.")
        kind = f"the model of step {run.made_by.step}, with its adapters merged in {precision}"
        kind += f" into what {spec.quantize} made of its base" if spec.quantize else ""
    elif not is_adapter:
        kind = f"the model of step {run.made_by.step}"
    with file_errors.failure(f"cannot write the model to {out}", out, raises=CheckpointError):
        saving.write_model(module, weights, out, tokenizer, uses_cache=spec.uses_cache, place=files.name_folder)
    return kind


def _run_of(checkpoint: Path) -> Run:
    """Verify the checkpoint's files, and read the plan and the settings of its run."""
    unusable, hint = f"{checkpoint} cannot be used", "choose another with --step"
    with failure(unusable, ValueError, hint=hint, raises=CheckpointError):
        made_by = manifest.read(checkpoint)
        if (damage := loading.first_damage(checkpoint, made_by)) is not None:
            raise ValueError(damage)
    out = checkpoint.absolute().parents[1]
    if not (out / PLAN).is_file():
        raise CheckpointError(
            f"{checkpoint} lies in no run's folder",
            because=f"{out / PLAN} is not there, which says what it is of",
            hint="give it where it was written: RUN/checkpoints/step-N",
        )
    return Run(Plan.read(out / PLAN), build(RunSettings, earlier_settings(out)), checkpoint, made_by)


def _empty(spec: ModelSpec, run: Run, saved: loading.Saved) -> tuple[ModelSpec, nn.Module]:
    """Build the model on meta, with as many classes as the checkpoint has."""
    dtype = DTYPES[run.plan.request.precision]
    module = spec.build(dtype=dtype, device="meta")
    if run.plan.model.task == "sequence-classification" and spec.factory is None:
        in_file, classes = saved.parameters(frozen=False), spec.config.num_labels
        parameters = [(name, parameter) for name, parameter in module.named_parameters() if name in in_file]
        others = {in_file[name] * classes // parameter.numel() for name, parameter in parameters} - {classes}
        if len(others) == 1:
            config = type(spec.config).from_dict(spec.config.to_dict() | {"num_labels": others.pop()})
            spec = replace(spec, config=config)
            module = spec.build(dtype=dtype, device="meta")
    shapes = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    if manifest.digest_of(shapes) != run.made_by.shapes:
        raise PlanMismatchError(
            f"{run.path} is of another model than {run.plan.request.model} is now",
            because="its parameters differ from those that were saved",
            hint="give the model as it was when the run was started",
        )
    return spec, module


def _weights(module: nn.Module, saved: loading.Saved) -> dict[str, Tensor]:
    """Return the saved tensors of the module, which is on meta, by name; tied parameters are one tensor."""
    trained, frozen = saved.parameters(frozen=False), saved.parameters(frozen=True) if saved.has_base else {}
    whole: dict[int, Tensor] = {}
    for name, parameter in module.named_parameters():
        if name in trained or name in frozen:
            flat = torch.empty(parameter.numel(), dtype=parameter.dtype, device="cpu")
            saved.copy(name, 0, flat, loading.MASTER if name in trained else loading.FROZEN, casts=name not in trained)
            whole[id(parameter)] = flat.view(parameter.shape)
    if not saved.has_base:
        return {name: whole[id(p)] for name, p in module.named_parameters(remove_duplicate=False) if id(p) in whole}
    weights = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in whole:
            weights[name] = whole[id(tensor)]
        elif name in saved.module:
            weights[name] = saved.buffer(name, tensor, casts=True).clone()
    return weights


def _merged(spec: ModelSpec, run: Run, weights: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Return the base in `dtype` with the adapters merged into it."""
    trained_in = DTYPES[run.plan.request.precision]
    module: Any = spec.build(dtype=dtype, device="cpu", seed=run.settings.seed)
    if run.made_by.base != frozen_base.of_module(module, trained_in):
        raise PlanMismatchError(
            f"{run.path} holds adapters of another base model",
            because=f"the weights of {spec.weights or spec.reference} are not those that they were trained with",
            hint="give the base model as it was; without --merge the adapters alone are written",
        )
    if spec.quantize is not None:
        packed, module = module, replace(spec, quantize=None).build(dtype=dtype, device="cpu", seed=run.settings.seed)
        for name, layer in quantised.named(packed):
            values = quantised.dequantised(layer)
            module.get_submodule(name).weight.data.copy_(values if layer.source_cls is nn.Linear else values.T)
    for name, parameter in module.named_parameters():
        if name in weights:
            parameter.data.copy_(weights[name])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # that sums are rounded
        return module.merge_and_unload()
