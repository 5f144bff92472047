"""Models given to `frugal.plan` as Python objects."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import frugal
from frugal.config.request import Request
from frugal.dryrun import worker
from frugal.dryrun.model_object import reference_of, without_values
from frugal.errors import RequestError
from frugal.models import factories, resolve
from frugal.models.objectives import SummedLoss
from tests.engine.unusual_modules import Complex, Sparse

SMALL = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32, "bos_token_id": 0,
         "eos_token_id": 0}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 3)
        self.again = self.first
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.again(self.first(x)[..., :4] * self.scale)))


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


OBJECTIVE = SummedLoss(_loss, example={"x": torch.zeros(4), "y": torch.tensor(0)})


def test_a_class_that_can_be_imported_is_named() -> None:
    assert reference_of(Net) == f"{__name__}:Net"


def test_a_configuration_is_the_model_that_its_file_makes() -> None:
    spec = resolve.resolve(reference_of(GPT2Config(**SMALL)))
    assert spec.task == "causal-lm" and spec.config.n_embd == 32


def test_a_copy_without_values_has_the_shapes_ties_and_small_buffers_of_the_module() -> None:
    module = Net()
    module.first.weight.requires_grad_(False)
    copied = without_values(module)
    assert all(parameter.is_meta for parameter in copied.parameters())
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in module.parameters()]
    assert copied.again.weight is copied.first.weight
    assert copied.scale.tolist() == [2.0] * 4


def test_a_module_is_built_on_meta_for_a_dry_run_and_with_random_weights_to_be_tried() -> None:
    reference = reference_of(Net(width=16), OBJECTIVE)
    on_meta, objective = factories.make_model(reference, factories.import_callable(reference), torch.device("meta"))
    assert objective is not None and all(tensor.is_meta for tensor in on_meta.state_dict().values())
    tried, _ = factories.make_model(reference, factories.import_callable(reference), torch.device("cpu"))
    assert tried.second.weight.shape == (3, 16) and tried.scale.tolist() == [2.0] * 4
    assert tried(torch.ones(1, 4)).isfinite().all()


def test_random_weights_are_not_trained_in_place_of_a_modules_own() -> None:
    reference = reference_of(Net(), OBJECTIVE)
    module, _ = factories.make_model(reference, factories.import_callable(reference), torch.device("cpu"))
    with pytest.raises(RequestError, match="has no weights"):
        factories.refuse_shapes_only(reference, module)


@pytest.mark.exhaustive  # two plans of one model: what it is handed over by is tested above
def test_a_module_and_its_configuration_need_the_same_memory() -> None:
    asked = {"gpus": 2, "device": "cpu", "mem": "2G", "global_batch": 4, "seq_len": 32}
    config = GPT2Config(**SMALL)
    from_config = frugal.plan(model=config, **asked)
    from_module = frugal.plan(model=GPT2LMHeadModel(config), **asked)
    assert replace(from_module.memory, loading=None) == replace(from_config.memory, loading=None)
    assert from_module.batch == from_config.batch


def test_a_class_of_a_notebook_is_handed_to_the_dry_run(tmp_path: Path) -> None:
    """`python -` has no file to import from, as a notebook has none; and the engine trains it there, on one rank."""
    script = """
import torch, frugal
from torch import nn
from frugal.models.objectives import SummedLoss

WIDTH = 8

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, WIDTH)

def loss(model, batch):
    return model.layer(batch["x"]).square().sum()

objective = SummedLoss(loss, example={"x": torch.zeros(4)})
plan = frugal.plan(model=Net, objective=objective, gpus=1, device="cpu", mem="1G", global_batch=4, precision="fp32")
engine = frugal.initialize(Net(), plan, objective)
first = engine.train_step([{"x": torch.ones(4)}] * 4).loss
print(plan.model.parameters, engine.train_step([{"x": torch.ones(4)}] * 4).loss < first)
engine.destroy()
"""
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1:] == ["40 True"], done.stderr


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(RequestError) as raised:
        frugal.plan(model=3, gpus=1, mem="12G")
    assert str(raised.value) == (
        "`model` is 3\n  because it must be a name, a path, a configuration of transformers, a module or a function "
        "that makes one"
    )


def test_what_cannot_be_pickled_is_refused() -> None:
    stream = sys.stdout.buffer
    with pytest.raises(RequestError, match="cannot be handed to the process of a dry run"):
        reference_of(lambda: stream)


def test_another_users_pickle_is_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = reference_of(lambda: Net())
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(RequestError, match="belongs to another user"):
        factories.import_callable(reference)


def test_a_function_that_returns_an_objective_takes_no_other() -> None:
    objective = SummedLoss(lambda model, batch: model(batch["x"]).sum(), example={"x": torch.zeros(2)})
    make = factories.import_callable(reference_of(lambda: (nn.Linear(2, 2), objective), objective))
    with pytest.raises(RequestError, match=r"two objectives were given"):
        make()


def sparse() -> Any:
    """A factory."""
    return Sparse(), {"x": torch.zeros(16)}


def complex_one() -> Any:
    """A factory."""
    return Complex(), {"x": torch.zeros(16)}


@pytest.mark.parametrize(("factory", "why"), [("sparse", "buckets are dense"), ("complex_one", "complex64")])
def test_what_no_stage_can_train_is_refused_before_it_is_traced(factory: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        worker._built(Request(model=f"{__name__}:{factory}", precision="fp32"), "fp32")
