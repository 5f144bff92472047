"""Adapters around models of several kinds: what peft makes, and what it would only warn of."""

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from torch import nn

from frugal.config.adapters import Lora
from frugal.errors import RequestError
from frugal.models.resolve import resolve
from frugal.models.spec import ModelSpec
from tests.engine.small_models import TINY

TASK_TYPES = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "sequence-classification": "SEQ_CLS"}
HEADS = {"gpt2": "causal-lm", "llama": "causal-lm", "bert": "sequence-classification", "t5": "seq2seq"}


def spec_of(family: str, tmp_path: Path, lora: str, task: str | None = None) -> ModelSpec:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **TINY[family]}))
    return replace(resolve(str(path), task or HEADS[family]), lora=Lora.of(lora))


def trainable(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("family", HEADS)
def test_what_is_trained_is_what_peft_trains_and_the_same_on_meta(family: str, tmp_path: Path) -> None:
    spec = spec_of(family, tmp_path, "r=4")
    ours = spec.build(dtype=torch.float32)
    asked = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type=TASK_TYPES[spec.task])
    theirs = peft.get_peft_model(replace(spec, lora=None).build(dtype=torch.float32), asked)
    assert trainable(ours) == trainable(theirs)
    assert type(ours) is type(theirs)
    spec = spec_of(family, tmp_path, "r=4,dora")
    real, meta = (spec.build(dtype=torch.bfloat16, device=device) for device in ("cpu", "meta"))
    kinds = [
        [(name, p.shape, p.dtype, p.requires_grad) for name, p in each.named_parameters()] for each in (real, meta)
    ]
    assert kinds[0] == kinds[1]
    assert {p.dtype for p in real.parameters()} == {torch.bfloat16}
    assert {tensor.device.type for tensor in (*meta.parameters(), *meta.buffers())} == {"meta"}


def test_the_first_adapters_depend_on_the_seed_alone(tmp_path: Path) -> None:
    spec = spec_of("llama", tmp_path, "r=4")
    replace(spec, lora=None).build(dtype=torch.float32, seed=1).save_pretrained(tmp_path / "base")
    pretrained = replace(resolve(str(tmp_path / "base")), lora=spec.lora)
    adapters = [
        {name: p for name, p in each.build(dtype=torch.float32, seed=7).named_parameters() if p.requires_grad}
        for each in (spec, pretrained)
    ]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])


def test_adapters_are_part_of_what_a_model_is(tmp_path: Path) -> None:
    fingerprints = {spec_of("llama", tmp_path, lora).fingerprint() for lora in ("r=4", "r=8", "r=4,dora")}
    without = replace(spec_of("llama", tmp_path, "r=4"), lora=None).fingerprint()
    assert len(fingerprints | {without}) == 4


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("q_prj,v_proj", ("`q_prj`, a target of --lora, is no module of Llama", "targets=q_proj, or all-linear")),
        ("input_layernorm", ("Target module LlamaRMSNorm",)),  # in peft's words
    ],
)
def test_what_cannot_be_adapted_is_refused(targets: str, said: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(RequestError) as error:
        spec_of("llama", tmp_path, f"r=4,targets={targets}").build(dtype=torch.float32, device="meta")
    assert all(part in str(error.value) for part in said)


ROUTERS = {
    "phimoe": {"num_local_experts": 4},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 64, "head_dim": 8},
}  # whose forwards return pairs


@pytest.mark.parametrize("family", ROUTERS)
def test_layers_that_return_no_tensor_have_no_adapters(family: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **TINY["llama"], **ROUTERS[family]}))
    spec = replace(resolve(str(path), "causal-lm"), lora=Lora.of("r=4"))
    model = spec.build(dtype=torch.float32)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted
    assert not any("router" in name for name in adapted)
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    with pytest.raises(RequestError, match="`router`, a target of --lora, cannot have adapters"):
        replace(spec, lora=Lora.of("r=4,targets=router")).build(dtype=torch.float32, device="meta")


def test_a_model_that_has_adapters_is_refused_with_others() -> None:
    spec = replace(resolve("tests.dryrun.test_frozen:lora"), lora=Lora.of("r=4"))
    with pytest.raises(RequestError, match="a model that has adapters already"):
        spec.build(dtype=torch.float32, device="meta")
