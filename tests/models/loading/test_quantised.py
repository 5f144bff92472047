"""Modules that are quantised, and their bytes: as transformers does it, read or made, on meta or for real."""

import copy
import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import frugal
from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.adapters import Lora
from frugal.config.request import Request
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.engine.engine import initialize
from frugal.errors import RequestError
from frugal.models.loading import placed, quantised
from frugal.models.objectives import CausalLM
from frugal.models.resolve import resolve
from frugal.models.spec import ModelSpec
from tests.engine.small_models import TINY
from tests.models.loading.test_placed import hashes, states

AUTO: dict[str, Any] = {
    "gpt2": transformers.AutoModelForCausalLM,
    "llama": transformers.AutoModelForCausalLM,
    "bert": transformers.AutoModelForSequenceClassification,
    "t5": transformers.AutoModelForSeq2SeqLM,
}
TASKS = {"bert": "sequence-classification", "t5": "seq2seq"}
INPUTS = {"t5": ("input_ids", "decoder_input_ids")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for family, auto in AUTO.items():
        torch.manual_seed(0)
        config = transformers.CONFIG_MAPPING[family].from_dict(TINY[family])
        auto.from_config(config).save_pretrained(folder / family, max_shard_size="50KB")
    return folder


def theirs(folder: Path, precision: str) -> Any:
    """By transformers alone."""
    asked = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[precision],
    )  # fmt: skip
    return AUTO[folder.name].from_pretrained(folder, dtype=DTYPES[precision], quantization_config=asked)


def spec_of(folder: Path) -> ModelSpec:
    return replace(resolve(str(folder), TASKS.get(folder.name)), quantize="nf4")


def scales_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the scales of each quantised module, as bitsandbytes would save them."""
    return {
        f"{name} {key}": value.tolist()
        for name, module in quantised.named(model)
        for key, value in module.weight.quant_state.as_dict(packed=True).items()
    }


@pytest.mark.parametrize("family", AUTO)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.exhaustive)])
def test_bytes_and_scales_are_those_of_transformers_alone(family: str, precision: str, folders: Path) -> None:
    expected = theirs(folders / family, precision)
    read = spec_of(folders / family).build(dtype=DTYPES[precision])
    whole = AUTO[family].from_pretrained(folders / family, dtype=DTYPES[precision])
    made = quantised.apply(whole, reference=family, dtype=DTYPES[precision])
    for ours in (read, made):
        assert hashes(dict(ours.named_parameters())) == hashes(dict(expected.named_parameters()))
        assert scales_of(ours) == scales_of(expected)
        assert [(name, type(each)) for name, each in ours.named_modules()] == [
            (name, type(each)) for name, each in expected.named_modules()
        ]
    with torch.no_grad():
        read.eval()(**{name: torch.arange(16)[None] for name in INPUTS.get(family, ("input_ids",))})
    assert hashes(dict(read.named_parameters())) == hashes(dict(expected.named_parameters())), "after an evaluation"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_on_meta_it_has_the_same_shapes_also_as_a_copy(family: str, folders: Path) -> None:
    spec = replace(spec_of(folders / family), lora=Lora.of("r=4"))
    real, meta = (spec.build(dtype=torch.bfloat16, device=device) for device in ("cpu", "meta"))
    for each in (meta, copy.deepcopy(meta)):
        kinds = [
            [(name, type(p).__name__, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()]
            for model in (real, each)
        ]
        assert kinds[0] == kinds[1]
        assert [s.shape for s in quantised.scales(real)] == [s.shape for s in quantised.scales(each)]
        assert {tensor.device.type for tensor in (*each.parameters(), *quantised.scales(each))} == {"meta"}
    assert quantised.packed(meta) == quantised.packed(real)
    assert spec.fingerprint() != replace(spec, quantize=None).fingerprint()


def in_place(model: Path, zero_stage: int) -> tuple[dict[str, str], dict[str, Any]]:
    """On a rank: bytes and scales of a model that was read into its place."""
    plan = plan_by_hand(
        world_size=2, global_batch=2, micro_batch=1, zero_stage=zero_stage,
        request={"lora": Lora.of("r=4"), "quantize": "nf4"},
    )  # fmt: skip
    module = placed.build(replace(spec_of(model), lora=plan.request.lora), plan, torch.device("cpu"), seed=5)
    engine = initialize(module, plan, CausalLM())
    parameters = {name for name, p in engine.module.named_parameters() if not p.requires_grad}
    with torch.no_grad():
        whole = {name: value for name, value in states(engine.module).items() if name in parameters}
    found = hashes(whole), scales_of(engine.module)
    engine.destroy()
    return found


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=pytest.mark.exhaustive), 3])
def test_every_rank_ends_up_with_them(zero_stage: int, folders: Path, two_ranks: Ranks) -> None:
    alone = replace(spec_of(folders / "llama"), lora=Lora.of("r=4")).build(dtype=torch.float32, seed=5)
    expected = hashes({name: p for name, p in alone.named_parameters() if not p.requires_grad}), scales_of(alone)
    for found in two_ranks.run(in_place, folders / "llama", zero_stage):
        assert found == expected


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "was given without --lora"),
        ({"lora": Lora.of("r=4,dora")}, "is impossible with dora in --lora"),
        ({"lora": Lora.of("r=4"), "offload": "nvme", "nvme_path": "/x"}, "is impossible with --offload nvme"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=f"--quantize nf4 {said}"):
        Request(quantize="nf4", **asked)


def test_what_cannot_be_quantised_is_refused(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="--quantize is impossible for mine"):
        quantised.apply(torch.nn.Linear(2, 2), reference="mine", dtype=torch.float32)
    theirs(folders / "llama", "fp32").save_pretrained(tmp_path / "packed")
    with pytest.raises(RequestError, match="is quantised already"):
        resolve(str(tmp_path / "packed"))
    config = tmp_path / "packed" / "config.json"
    for method in ("gptq", "awq", "fp8", "mxfp4", "compressed-tensors"):
        packed = json.loads(config.read_text()) | {"quantization_config": {"quant_method": method}}
        (tmp_path / "config.json").write_text(json.dumps(packed))
        with pytest.raises(RequestError, match=f"{method} has packed its weights"):
            resolve(str(tmp_path / "config.json"))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as `import` and `find_spec` see what is not there
    with pytest.raises(RequestError, match="pip install bitsandbytes"):
        spec_of(folders / "llama").build(dtype=torch.float32, device="meta")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_has_the_bits_of_bitsandbytes_own_and_keeps_the_parameter_alone(
    precision: str, has_bias: bool
) -> None:
    """Where the weight is elsewhere in backward, as under ZeRO-3, and nothing keeps what forward read."""
    bnb = quantised.library()
    from bitsandbytes.autograd._functions import MatMul4Bit

    dtype, generator = DTYPES[precision], torch.Generator().manual_seed(0)
    layer = bnb.nn.Linear4bit(96, 64, bias=has_bias, compute_dtype=dtype, compress_statistics=True, quant_type="nf4")
    layer = layer.to(dtype).to("cpu")
    inputs, grad = (torch.randn(2, 3, n, generator=generator).to(dtype) for n in (96, 64))
    mine, same = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    expected = MatMul4Bit.apply(same, layer.weight, None, layer.bias, layer.weight.quant_state)
    expected.backward(grad)
    expected = expected.detach()  # without its graph, which keeps what it read
    output = layer(mine)
    kept = layer.weight.data
    read = weakref.ref(kept.untyped_storage())
    layer.weight.data = kept.clone()
    del kept
    assert read() is None
    output.backward(grad)
    assert torch.equal(output, expected)
    assert torch.equal(mine.grad, same.grad)


def test_products_with_packed_weights_are_counted_as_those_with_whole_ones(folders: Path) -> None:
    asked: dict[str, Any] = {"model": str(folders / "llama"), "lora": "r=4", "gpus": 1, "mem": "8G", "draft": True}
    asked |= {"seq_len": 32, "global_batch": 4, "activation_checkpointing": "full"}
    whole, packed = frugal.plan(**asked), frugal.plan(**asked, quantize="nf4")
    assert whole.model.flops_per_sample == packed.model.flops_per_sample > 0
    assert packed.time.compute_seconds >= whole.time.compute_seconds
