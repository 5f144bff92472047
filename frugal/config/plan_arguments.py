"""What `frugal.plan` takes by keyword, for editors and type checkers; the table of settings says what each is for.

`PlanArguments` repeats the names and kinds of `frugal.config.schema.PLAN_SETTINGS`, because a type checker reads no
table; a test holds the two equal.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from frugal.config.adapters import Lora
from frugal.config.hardware.build_cluster import Amounts
from frugal.config.hardware.cluster import DeviceKind
from frugal.config.layers import LayerMode, LayerModes
from frugal.config.optimizers import OptimizerImplementation, OptimizerName, OptimizerStates, Rule
from frugal.config.request import (
    AccumulationDtype,
    ActivationCheckpointingChoice,
    BatchNormChoice,
    LossChoice,
    OffloadChoice,
    Precision,
    Quantization,
    Task,
)  # fmt: skip
from frugal.config.sample_lengths import Lengths
from frugal.config.schema import PLAN_SETTINGS


class PlanArguments(TypedDict, total=False):
    """The settings of a plan; None is the same as not given."""

    model: Any  # a name or a path, a configuration of transformers, a torch.nn.Module, or what makes one
    task: Task | None
    global_batch: int | None
    global_tokens: int | None
    seq_len: int | None
    max_samples_per_gpu: int | None
    max_tokens_per_gpu: int | None
    micro_batch: int | None
    accumulation_steps: int | None
    even: bool | None
    zero_stage: int | None
    activation_checkpointing: ActivationCheckpointingChoice | None
    layer_modes: LayerModes | str | Sequence[tuple[LayerMode, int]] | None
    loss: LossChoice | None
    mlp: LossChoice | None
    offload: OffloadChoice | None
    offload_ratio: float | None
    nvme_path: str | None
    precision: Precision | None
    optimizer: OptimizerName | None
    optimizer_implementation: OptimizerImplementation | None
    optimizer_states: OptimizerStates | None
    states: OptimizerStates | None
    momentum: float | None
    adam_beta1: float | None
    adam_beta2: float | None
    adam_epsilon: float | None
    learning_rate: float | None
    lr: float | None
    reference_batch: int | None
    lr_rule: Rule | None
    weight_decay: float | None
    decay_norms: bool | None
    gradient_clipping: float | None
    gradient_accumulation_dtype: AccumulationDtype | None
    sequence_parallel: int | None
    overlap_comm: bool | None
    expandable_segments: bool | None
    reduce_bucket_elements: int | None
    lengths: Lengths | Mapping[int, int] | list[int] | str | os.PathLike[str] | None
    pack: bool | None
    batch_norm: BatchNormChoice | None
    lora: Lora | str | None
    quantize: Quantization | None
    gpus: int | None
    nodes: int | None
    mem: Amounts | None
    hostfile: str | os.PathLike[str] | None
    gpu: str | None
    held: Amounts | None
    host_mem: str | int | None
    host_disk: str | int | None
    device: DeviceKind | None
    calibration: bool | None


_SHORT = {
    short.removeprefix("--").replace("-", "_"): name for name, row in PLAN_SETTINGS.items() for short in row.short
}
"""`lr` -> `learning_rate`."""


def in_full(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their full names, and paths as text."""
    return {
        _SHORT.get(name, name): os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in settings.items()
        if not (name in _SHORT and value is None)
    }


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """That of `function`, with every setting in place of `**settings`: what `help` and notebooks show."""
    own = inspect.signature(function)
    named = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    named += [inspect.Parameter(name, keyword, default=row.default) for name, row in PLAN_SETTINGS.items()]
    return own.replace(parameters=named)
