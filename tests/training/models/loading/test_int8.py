"""Weights in 8 bits without outlier columns: bitsandbytes' numbers, its product, whatever else is in a micro-batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
import transformers
from bitsandbytes.autograd._functions import MatMul8bitLt

from frugal.config.adapters import Lora
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.training.models.loading import int8, quantised
from frugal.training.models.resolve import resolve
from frugal.training.models.spec import ModelSpec
from tests.training.models.loading.test_placed import hashes, states
from tests.training.small_models import TINY


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for family in ("gpt2", "llama"):
        torch.manual_seed(0)
        config = transformers.CONFIG_MAPPING[family].from_dict(TINY[family])
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    return folder


def theirs(folder: Path, precision: str) -> Any:
    """By transformers alone."""
    asked = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision], quantization_config=asked)


def spec_of(folder: Path) -> ModelSpec:
    return replace(resolve(str(folder)), quantize="int8")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.exhaustive)])
def test_bytes_and_scales_are_those_of_transformers_alone(family: str, precision: str, folders: Path) -> None:
    expected = theirs(folders / family, precision)
    read = spec_of(folders / family).build(dtype=DTYPES[precision])
    whole = transformers.AutoModelForCausalLM.from_pretrained(folders / family, dtype=DTYPES[precision])
    made = quantised.apply(whole, "int8", reference=family, dtype=DTYPES[precision])
    for ours in (read, made):
        assert hashes(dict(ours.named_parameters())) == hashes(dict(expected.named_parameters()))
        scales = {name: module.state.SCB for name, module in quantised.named(ours)}
        assert scales
        for name, module in quantised.named(expected):
            assert torch.equal(scales.pop(name), module.weight.SCB)
        assert not scales


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_on_meta_it_has_the_same_shapes_and_takes_a_byte_an_element_and_four_a_row(family: str, folders: Path) -> None:
    spec = replace(spec_of(folders / family), lora=Lora.parse("r=4"))
    real, meta = (spec.build(dtype=torch.bfloat16, device=device) for device in ("cpu", "meta"))
    kinds = [
        [(name, type(p).__name__, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()]
        for model in (real, meta)
    ]
    assert kinds[0] == kinds[1]
    weights = [module.weight for _, module in quantised.named(meta)]
    packed = quantised.packed(meta)
    assert packed == quantised.packed(real)
    assert packed.packed_bytes == packed.elements == sum(weight.numel() for weight in weights)
    assert packed.scales_bytes == 4 * sum(weight.shape[0] for weight in weights)


def layer(precision: str, *, bias: bool) -> tuple[Any, torch.Tensor]:
    """A quantised one, and what goes in: two samples, one of which has values far from the others."""
    torch.manual_seed(0)
    made = bitsandbytes.nn.Linear8bitLt(64, 32, bias=bias, has_fp16_weights=False)
    made.requires_grad_(False)
    made.weight = int8.pack(torch.randn(32, 64))
    int8.settle(made, None)
    inputs = torch.randn(2, 5, 64, dtype=DTYPES[precision])
    inputs[1, :, 3] *= 50
    return made.to(DTYPES[precision]), inputs.requires_grad_()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_and_its_gradient_are_bitsandbytes_own(precision: str, bias: bool) -> None:
    made, inputs = layer(precision, bias=bias)
    assert made.weight.dtype == torch.int8
    state = bitsandbytes.MatmulLtState()
    state.CB, state.SCB, state.has_fp16_weights = made.weight.data, made.state.SCB, False
    output, expected = made(inputs), MatMul8bitLt.apply(inputs, made.weight, None, made.bias, state)
    assert torch.equal(output, expected)
    given = torch.randn_like(output)
    assert torch.equal(*(torch.autograd.grad(each, inputs, given)[0] for each in (output, expected)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sample_comes_out_alike_alone_and_beside_one_with_outliers(precision: str) -> None:
    made, inputs = layer(precision, bias=True)
    assert torch.equal(made(inputs)[0], made(inputs[:1])[0])


def test_an_evaluation_leaves_the_bytes_as_they_are(folders: Path) -> None:
    model = spec_of(folders / "llama").build(dtype=torch.float32)
    before = hashes(states(model))
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(16)[None])
    assert hashes(states(model)) == before


def test_peft_puts_adapters_around_it_and_the_logits_are_those_of_the_libraries_alone(folders: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    expected = peft.get_peft_model(theirs(folders / "llama", "fp32"), config).eval()
    ours = replace(spec_of(folders / "llama"), lora=Lora.parse("r=4")).build(dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [model(input_ids=torch.arange(16)[None]).logits for model in (ours, expected)]
    assert torch.allclose(*logits, atol=64 * 2**-24)  # 64 products in a sum, each rounded; logits are below 1
