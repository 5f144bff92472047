"""Checks of Liger's kernels in Triton's interpreter, run by `test_kernels.py`, in a process of its own.

It holds tensors longer than a kernel does, so that nothing can be said of memory; `bench.emulated_gpu` does.
"""

import copy
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from bench.kernels import (
    interpreter,  # noqa: F401 - has what Triton's interpreter lacks
    numerics,
)
from bench.ranks import Ranks
from frugal.config.adapters import Lora
from frugal.config.schema import understand
from frugal.dryrun.client import DryRunSource
from frugal.dryrun.planner import make_plan, plan
from frugal.dryrun.pool import shared_workers, workers
from frugal.models import activation_checkpointing
from frugal.models.fused import liger_internals, replacement
from frugal.models.objectives import CausalLM
from frugal.planning.plan import Plan
from frugal.planning.strategy import Strategy
from frugal.planning.what_if import kernels_bring
from tests.engine.engines import gradient_of_step, plan_here
from tests.engine.gradients import SGD, Gradient, relative_error, with_bound
from tests.engine.small_models import TINY, tiny, with_adapters
from tests.models.losses.test_cross_entropy import hold

SAMPLES = [
    {"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)} for ids in ([5, 9, 3, 7], [4, 8], [11, 6, 13])
]


def model_of(family: str) -> Any:
    """A small model whose norms have weights of their own."""
    if family in TINY:
        model = tiny("causal-lm", family).train()
    else:
        torch.manual_seed(0)
        config = transformers.CONFIG_MAPPING[family].from_dict(TINY["llama"] | {"model_type": family, "head_dim": 16})
        model = transformers.AutoModelForCausalLM.from_config(config).train()
    random = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=random)
    return model


def gradient_of(model: nn.Module) -> tuple[float, Gradient]:
    """The summed loss of `SAMPLES`, and its gradient in fp64."""
    objective = CausalLM()
    loss = objective.loss_sum(model, objective.collate(SAMPLES))
    loss.backward()
    return loss.item(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def by_torch_alone(family: str, dtype: torch.dtype) -> tuple[float, Gradient]:
    """The same by PyTorch alone."""
    return gradient_of(model_of(family).to(dtype))


NAMES = {
    "llama": ("2 RoPE", "2 SwiGLU", "5 RMSNorm"),
    "gemma": ("2 RoPE", "2 GeGLU", "5 RMSNorm"),
    "qwen3": ("2 RoPE", "9 RMSNorm", "2 SwiGLU"),
    "gpt2": ("2 GELU",),
}
MODES = [("llama", mode) for mode in ("off", "full", "selective", "offloaded")]


@pytest.mark.parametrize(("family", "mode"), [*MODES, ("gemma", "off"), ("qwen3", "off"), ("gpt2", "off")])
def test_loss_and_gradient_are_those_of_torchs_kernels(family: str, mode: Any) -> None:
    model = model_of(family)
    assert replacement.names(model) == NAMES.get(family, ())
    replacement.apply(model)
    activation_checkpointing.apply(model, mode)
    loss, gradient = gradient_of(model)
    (expected_loss, expected), bound = with_bound(by_torch_alone, family)
    assert loss == pytest.approx(expected_loss, rel=bound)
    assert relative_error(gradient, expected) < bound


def test_in_fp16_the_gradient_is_as_near_to_the_exact_one_as_that_of_torchs_kernels() -> None:
    exact = gradient_of(model_of("gemma").half().double())[1]
    model = model_of("gemma").half()
    by_torch = relative_error(gradient_of(copy.deepcopy(model))[1], exact)
    replacement.apply(model)
    assert relative_error(gradient_of(model)[1], exact) < 1.2 * by_torch


ROUNDING_OF_SUMS = 4 * torch.finfo(torch.float32).eps
"""Of losses, whose sums are in fp32 in both, in another order."""


@pytest.mark.parametrize("name", numerics.CASES)
def test_in_bf16_a_kernel_is_no_further_from_fp64_than_torchs_operators(name: str) -> None:
    for seed in range(5):
        for of_torch, of_kernel in numerics.errors(name, seed):
            assert of_kernel <= 1.01 * of_torch + ROUNDING_OF_SUMS


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3"])
def test_a_model_that_becomes_bf16_after_its_kernels_were_chosen_is_as_near_to_fp64(family: str) -> None:
    exact = gradient_of(model_of(family).bfloat16().double())[1]
    by_torch = relative_error(gradient_of(model_of(family).bfloat16())[1], exact)
    model = model_of(family)
    replacement.apply(model)
    assert relative_error(gradient_of(model.bfloat16())[1], exact) < 1.2 * by_torch


def test_a_gradient_that_others_have_too_is_not_overwritten() -> None:
    norm, x = model_of("llama").model.norm, torch.randn(2, 3, 32, requires_grad=True)

    def of_residual(norm: nn.Module) -> Tensor:
        result = x + norm(x)  # autograd gives both parts of a sum the same gradient
        return torch.autograd.grad(result, x, torch.ones_like(result))[0]

    expected = of_residual(norm)
    replacement.apply(norm)
    torch.testing.assert_close(of_residual(norm), expected)


def test_norms_in_fp32_inside_a_model_in_fp16_run_as_before() -> None:
    model = model_of("gemma").half()
    model.model.layers[0].input_layernorm.float()
    exact = gradient_of(copy.deepcopy(model).double())[1]
    by_torch = relative_error(gradient_of(copy.deepcopy(model))[1], exact)
    replacement.apply(model)
    assert relative_error(gradient_of(model)[1], exact) < 1.2 * by_torch


def test_the_result_is_that_of_ligers_own_patch_of_a_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
    from transformers.models.llama import modeling_llama

    bound = with_bound(by_torch_alone, "llama")[1]
    for name in ("LlamaRMSNorm", "LlamaMLP"):  # it also replaces the classes
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    theirs, ours = model_of("llama"), model_of("llama")
    replacement.apply(ours)
    _apply_liger_kernel_to_instance(
        theirs, rope=False, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )
    (expected_loss, expected), (loss, gradient) = gradient_of(theirs), gradient_of(ours)
    assert loss == pytest.approx(expected_loss, rel=bound)
    assert relative_error(gradient, expected) < bound


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "geglu", "rope"])
def test_the_parameters_that_kernels_change_in_place_are_those_of_their_source(name: str) -> None:
    module = importlib.import_module(f"liger_kernel.ops.{name}")
    kernels = {key: each.fn for key, each in vars(module).items() if key.endswith(("_kernel", "_tiled", "_rope"))}
    for key, function in kernels.items():
        source, parameters = inspect.getsource(function), set(inspect.signature(function).parameters)
        read, written = (set(re.findall(rf"tl\.{way}\(\s*(\w+)", source)) for way in ("load", "store"))
        assert read & written & parameters == set(liger_internals.IN_PLACE.get(key, ())), key
    assert kernels


def test_formulas_of_the_trial_are_those_of_the_kernels() -> None:
    library, x, weight = liger_internals.library(), torch.randn(3, 40).half(), torch.randn(40).half()
    for offset, casting in ((0.0, "llama"), (1.0, "gemma")):
        ours = replacement.RMSNorm(1e-3, offset, casting)(x, weight)  # type: ignore[arg-type]  # one of the two
        theirs = library.rms_norm(x, weight, 1e-3, offset, casting, False)
        assert (ours != theirs).float().mean() < 0.02
    gate, up = torch.randn(2, 3, 40)
    for activation in ("silu", "gelu"):
        product = replacement.activated(activation, gate) * up  # type: ignore[arg-type]  # as above
        torch.testing.assert_close(getattr(library, activation)(gate, up), product)


def test_losses_and_gradients_of_rows_are_those_of_fp64_rounded_once() -> None:
    hold("liger", ulps=1.01)  # it cuts bf16 off


def adapted(lora: str | None) -> nn.Module:
    """A small Llama; with adapters that do something, if asked."""
    return with_adapters(model_of("llama"), lora).train()


def measured_gradient(zero_stage: int, strategy: dict[str, Any], lora: str | None) -> Gradient:
    """Return what DeepSpeed applies of `SAMPLES`. Runs on ranks."""
    request = SGD | {"lora": None if lora is None else Lora.of(lora)}
    return gradient_of_step(plan_here(zero_stage, 3, 2, request, kernels="liger", **strategy), adapted(lora), SAMPLES)


# In plans.


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: None) -> str:
    """The configuration of a small Llama, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY["llama"] | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return str(path)


@pytest.fixture(scope="module")
def shared() -> Iterator[None]:
    """One pool of processes for all plans: each takes seconds to start."""
    with shared_workers():
        yield


ASKED = {"gpus": 2, "gpu": "a100-80g", "seq_len": 64, "global_batch": 16}


def test_a_plan_takes_them_and_says_so_unless_it_is_told_not_to_or_the_cards_are_too_old(config: str) -> None:
    fused = plan(model=config, **ASKED)
    assert fused.strategy.kernels == "liger"
    assert re.fullmatch(r"liger: \d+ % less time, [\d.]+ MiB less \(predicted\)", dict(fused.verdict)["kernels"])
    assert any(why.endswith("; Liger's run 2 RoPE, 2 SwiGLU, 5 RMSNorm") for why in fused.why)
    assert fused.is_draft is False and not any("off the dry run" in note for note in fused.warnings)
    for others in ({"kernels": "plain"}, {"gpu": "t4-16g", "precision": "fp16"}):
        assert plan(model=config, **(ASKED | others)).strategy.kernels == "plain"


def of_documents(tokens: int, **settings: Any) -> Plan:
    """The plan for packs whose documents have that many tokens on average; 0: attention takes masks."""
    request, cluster, defaults = understand(settings)
    return make_plan(replace(request, document_tokens=tokens), cluster, defaults)


@pytest.mark.exhaustive
def test_each_kind_of_kernel_is_said_to_bring_what_a_plan_without_it_lacks(config: str) -> None:
    asked = ASKED | {"model": config, "pack": True, "zero_stage": 2, "activation_checkpointing": "off"}
    fused = of_documents(16, **asked)
    assert fused.kernels.startswith("liger, varlen attention: ")
    with closing(workers()) as pool:
        for kind, tokens, change in (("liger", 16, {"kernels": "plain"}), ("varlen attention", 0, {})):
            said = kernels_bring(fused, [kind], partial(DryRunSource, pool=pool, will_dry_run=False))
            other = of_documents(tokens, **asked | {"loss": fused.strategy.loss} | change)
            less = 100 * (1 - fused.time.total_seconds / other.time.total_seconds)
            assert other.batch.largest_micro_batch == fused.batch.largest_micro_batch
            assert said.startswith(f"{kind}: {less:.0f} % less time, ") and said.endswith(" MiB less (predicted)")


@pytest.mark.parametrize(
    ("zero_stage", "mode"), [(3, "selective"), pytest.param(2, "off", marks=pytest.mark.exhaustive)]
)
def test_arithmetic_and_a_dry_run_with_them_have_the_same_peak_and_less_traffic(
    zero_stage: int, mode: Any, config: str
) -> None:
    traffic = {}
    kernels: Any
    for kernels in ("plain", "liger"):
        request, cluster, _ = understand({"model": config, "kernels": kernels, **ASKED})
        with DryRunSource(request, cluster) as source:
            strategy = Strategy(zero_stage=zero_stage, activation_checkpointing=mode, kernels=kernels)
            profile = source.profile(strategy, True)
            traffic[kernels] = profile.costs.work.traffic.at(8)
            drafted = profile.memory(8, cluster.devices[0]).live_bytes
            assert kernels == "plain" or drafted == pytest.approx(source.dry_run(strategy, 8, 2).live_bytes, abs=100)
    assert traffic["liger"] < 0.8 * traffic["plain"]


# On real ranks.


SMALL = {"persistence_threshold_elements": 10, "max_live_elements": 6_000, "prefetch_bucket_elements": 5_000}
MIXED = {"activation_checkpointing": "budget", "layer_modes": (("selective", 1), ("full", 1))}


@pytest.mark.parametrize(
    ("zero_stage", "strategy", "lora"),
    [
        (3, SMALL | MIXED, None),
        *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in ((0, {}, None), (3, {"mlp": "tiled"}, "r=4"))),
    ],
)
def test_deepspeed_applies_the_gradient_of_plain_pytorch(
    zero_stage: int, strategy: dict[str, Any], lora: str | None, two_ranks: Ranks
) -> None:
    reference, bound = with_bound(lambda dtype: gradient_of(adapted(lora).to(dtype))[1])
    targets = CausalLM().count(CausalLM().collate(SAMPLES))
    reference = {name: part / targets for name, part in reference.items()}
    for gradient in two_ranks.run(measured_gradient, zero_stage, strategy, lora, timeout=900):
        assert relative_error(gradient, reference) < bound


class Summing(nn.Module):
    """A norm of the sum of what it takes, in heads as wide as its weight."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.rand(width)), 1e-6

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        heads = (x if residual is None else x + residual).unflatten(-1, (-1, len(self.weight)))
        scale = torch.rsqrt(heads.float().square().mean(-1, keepdim=True) + self.epsilon)
        return (self.weight * (heads.float() * scale).to(x.dtype)).flatten(-2)


@pytest.mark.parametrize(
    "given", [{}, {"residual": torch.ones(3, 8)}, {"width": 16}], ids=["usual", "two inputs", "heads"]
)
def test_a_norm_that_is_called_otherwise_than_it_was_tried_runs_as_before(given: dict[str, Any]) -> None:
    norm, x = Summing(), torch.randn(3, given.pop("width", 8), generator=torch.Generator().manual_seed(0))
    expected = norm(x, **given)
    assert replacement.names(norm) == ("1 RMSNorm",)
    replacement.apply(norm)
    assert torch.allclose(norm(x, **given), expected, rtol=1e-6)  # a few roundings in fp32
