"""The placement of parameters: each goes to where DeepSpeed's engine will have it, as soon as it has its values.

Stages 0 to 2 keep parameters whole on the device. Stage 3 splits them over the ranks, on the device or the host; here
each rank takes its part of its own copy, or of rank 0's, one parameter after the other. So no rank holds
more of a model than its own part and one parameter.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.utils import is_zero_param
from torch import nn

from frugal.config.request import Request
from frugal.deepspeed_adapter import kernels
from frugal.deepspeed_adapter.json_config import batch_config, strategy_config
from frugal.planning.batch import BatchPlan
from frugal.planning.strategy import Strategy
from frugal.required import put


class Placement:
    """The place of parameters under a strategy, made on all ranks after they have joined."""

    def __init__(self, request: Request, strategy: Strategy, batch: BatchPlan, device: torch.device) -> None:
        self._device = device
        self._splitting: Any = None
        if strategy.zero_stage == 3:
            config = batch_config(batch) | strategy_config(request, strategy)
            self._dtype = kernels.DTYPES[request.precision]
            self._splitting = splitting(nn.Module(), config, self._dtype)

    def put(self, parameter: nn.Parameter) -> None:
        """Move a parameter that every rank has to its place. No communication."""
        if self._splitting is None:
            parameter.data = parameter.data.to(self._device, copy=True)
        else:
            parameter.data = self._as_trained(parameter.data)
            with as_vectors([parameter]):
                self._splitting._convert_to_deepspeed_param(parameter)
                parameter.partition()  # type: ignore[attr-defined]  # DeepSpeed's
            parameter.data = parameter.data.to(self._device)  # it is empty, and only its device counts

    @contextmanager
    def told(self) -> Iterator[None]:
        """Let peft know inside the `with` block, through transformers, that parameters may be split."""
        from transformers.integrations import HfDeepSpeedConfig

        kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 0 if self._splitting is None else 3}})
        yield
        del kept  # transformers has a weak reference

    def send(self, model: nn.Module) -> None:
        """Move rank 0's model to its place on all ranks, where it is the same on meta. Collective."""
        sent: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in sent:
                        sent[id(parameter)] = self._sent(parameter)
                    module._parameters[name] = sent[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = filled = self._filled(buffer)
                    dist.broadcast(filled, src=0)

    def _sent(self, parameter: nn.Parameter) -> nn.Parameter:
        data = parameter.data if self._splitting is None else self._as_trained(parameter.data)
        if parameter.is_meta:  # torch lets no tensor on meta become another
            original, parameter = parameter, nn.Parameter(self._filled(data), parameter.requires_grad)
            parameter.__dict__.update(original.__dict__)
        else:
            parameter.data = data.to(self._device)
        if self._splitting is not None:
            with as_vectors([parameter]):
                self._splitting._zero_init_param(parameter)  # sends it
        return parameter  # otherwise the engine sends it

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device, uninitialised if it was on meta."""
        return torch.empty_like(tensor, device=self._device) if tensor.is_meta else tensor.to(self._device)

    def _as_trained(self, data: torch.Tensor) -> torch.Tensor:
        return (data.to(self._dtype) if data.is_floating_point() else data).contiguous()


def splitting(module: nn.Module, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return DeepSpeed's object that splits the parameters of `module`."""
    return Init(module=module, config_dict_or_path=config, dtype=dtype)


@contextmanager
def as_vectors(parameters: Iterable[Any]) -> Iterator[None]:
    """Give parameters without dimensions one inside the `with` block: DeepSpeed sends each as a vector of bytes."""
    scalars = [parameter for parameter in parameters if parameter.ndim == 0]
    for parameter in scalars:
        parameter.data = parameter.data.view(1)
    yield
    for parameter in scalars:
        if is_split(parameter):
            put(parameter, "ds_shape", torch.Size())
        else:
            parameter.data = parameter.data.view(())


def is_split(parameter: nn.Parameter) -> bool:
    """Return whether stage 3 has split the parameter, which is then empty."""
    return bool(is_zero_param(parameter))


def num_elements(parameter: nn.Parameter) -> int:
    """Return the elements of the whole parameter, split or not."""
    return int(parameter.ds_numel) if is_split(parameter) else parameter.numel()  # type: ignore[attr-defined]
