"""Models by name, file or factory, and the objectives that go with them."""

import json
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from frugal.data.tokenizer import byte_tokenizer
from frugal.models import factories
from frugal.models.objectives import CausalLM, MaskedLM, Seq2Seq, SequenceClassification, SummedLoss
from frugal.models.resolve import presets, resolve
from tests.engine.small_models import TINY, tiny_gpt2

pytestmark = pytest.mark.usefixtures("offline")


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# What a reference may be.


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    model = resolve(name).build(dtype=torch.bfloat16, device="meta")
    assert parameters(model) == presets()[name]["parameters"]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


def test_a_model_type_or_a_config_file_is_a_model_with_random_weights(tmp_path: Path) -> None:
    spec = resolve("gpt_neo")
    assert (spec.task, spec.vocab_size, spec.max_positions) == ("causal-lm", 50257, 2048)
    (tmp_path / "small.json").write_text(json.dumps({"model_type": "bert", **TINY["bert"]}))
    spec = resolve("small.json")
    assert (spec.task, spec.vocab_size, spec.max_positions, spec.weights) == ("masked-lm", 256, 128, None)
    assert parameters(spec.build(dtype=torch.float32)) > 0


def test_a_model_folder_brings_its_weights_which_are_not_read_on_meta(tmp_path: Path) -> None:
    model = tiny_gpt2(seed=3)
    model.save_pretrained(tmp_path / "saved")
    spec = resolve(str(tmp_path / "saved"))
    loaded = spec.build(dtype=torch.float32, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert loaded.training
    (tmp_path / "saved/model.safetensors").write_bytes(b"nonsense")
    assert next(spec.build(dtype=torch.float32, device="meta").parameters()).is_meta


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize("where", ["my_models", "my_models.py", "./my_models.py"])
def test_a_factory_brings_its_module_and_its_objective(where: str) -> None:
    spec = resolve(f"{where}:mine")
    assert spec.task == "own"
    assert (spec.max_positions, spec.vocab_size) == (None, None)
    assert isinstance(spec.objective(), SummedLoss)
    module = spec.build(dtype=torch.bfloat16)
    assert isinstance(module, nn.Linear)
    assert module.weight.dtype == torch.bfloat16


def rotating() -> nn.Module:
    """A factory."""
    module = nn.Linear(2, 2)
    module.register_buffer("turns", torch.ones(3, dtype=torch.complex64))
    module.register_buffer("counts", torch.ones(3, dtype=torch.long))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_factory_s_complex_and_whole_numbers_keep_their_types(dtype: torch.dtype) -> None:
    module = replace(resolve("gpt2"), factory=rotating).build(dtype=dtype)
    types = {name: each.dtype for name, each in module.state_dict().items()}
    assert types == {"weight": dtype, "bias": dtype, "turns": torch.complex64, "counts": torch.int64}


@pytest.mark.usefixtures("factories")
def test_an_example_that_a_factory_makes_on_meta_has_values_and_a_known_model_needs_none() -> None:
    objective = resolve("my_models.py:mine").objective()
    for batch in (objective.collate([objective.dummy()]), objective.example(2, 8)):
        assert torch.equal(batch["x"], torch.zeros(len(batch["x"]), 4))
    spec = resolve("my_models.py:language_model")  # of transformers: it needs no objective
    assert (spec.task, spec.vocab_size, spec.max_positions) == ("causal-lm", 256, 128)
    assert isinstance(spec.objective(), CausalLM)


def test_samples_made_for_an_encoder_decoder_s_classifier_end_in_its_end_token() -> None:
    objective = resolve("t5", "sequence-classification").objective()
    assert objective.example(2, 4)["input_ids"].tolist() == [[0, 0, 0, 1]] * 2
    assert objective.collate([objective.dummy()])["input_ids"].tolist() == [[0, 1]]


# What is built.


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize("reference", ["small.json", "my_models.py:mine"])
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(reference: str, tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps({"model_type": "gpt2", **TINY["gpt2"]}))
    spec = resolve(reference)
    torch.manual_seed(99)
    first, again, other = (next(spec.build(dtype=torch.float32, seed=s).parameters()) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.initial_seed() == 99, "building changed the caller's random numbers"


KINDS = {
    "causal-lm": CausalLM, "masked-lm": MaskedLM, "seq2seq": Seq2Seq, "sequence-classification": SequenceClassification,
}  # fmt: skip


@pytest.mark.parametrize(
    ("reference", "task", "inferred"),
    [
        ("gpt2", None, "causal-lm"),
        ("bert-base", None, "masked-lm"),
        ("t5-small", None, "seq2seq"),
        ("transformer-base", None, "seq2seq"),
        ("bart", None, "seq2seq"),
        ("electra", None, "masked-lm"),
        ("bert-base", "causal-lm", "causal-lm"),
        ("roberta-base", "sequence-classification", "sequence-classification"),
    ],
)
def test_task_and_objective_are_what_the_architecture_is_for_unless_said(
    reference: str, task: str | None, inferred: str
) -> None:
    spec = resolve(reference, task)
    assert spec.task == inferred
    for tokenizer in (None, byte_tokenizer()):
        assert isinstance(spec.objective(tokenizer), KINDS[inferred])


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForSequenceClassification", "sequence-classification"),
        ("BertLMHeadModel", "causal-lm"),
        ("BertModel", "masked-lm"),
    ],
)
def test_the_task_is_what_the_configuration_names(architecture: str, task: str, tmp_path: Path) -> None:
    config = {"model_type": "bert", **TINY["bert"], "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve("config.json").task == task


def test_a_model_grows_to_the_classes_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps({"model_type": "bert", **TINY["bert"]}))
    spec = resolve("small.json", "sequence-classification")
    grown = resolve("small.json", "sequence-classification", num_labels=7)
    assert grown.build(dtype=torch.float32).classifier.out_features == 7
    assert grown.fingerprint() == spec.fingerprint()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_decoder_that_classifies_has_a_padding_token(family: str, tmp_path: Path) -> None:
    config = {name: value for name, value in TINY[family].items() if name != "pad_token_id"}
    (tmp_path / "small.json").write_text(json.dumps({"model_type": family, **config}))
    spec = resolve("small.json", "sequence-classification", num_labels=3)
    objective = spec.objective()
    batch = objective.collate([{"input_ids": [5, 6, 7], "label": 0}, {"input_ids": [5], "label": 2}])
    assert objective.loss_sum(spec.build(dtype=torch.float32), batch).isfinite()


def test_the_tokenizers_special_tokens_become_the_models() -> None:
    spec = resolve("transformer-base").for_tokenizer(byte_tokenizer())
    assert (spec.config.pad_token_id, spec.config.eos_token_id, spec.config.decoder_start_token_id) == (0, 1, 0)
    assert spec.fingerprint() == resolve("transformer-base").fingerprint()


def test_a_causal_model_is_not_told_of_padding() -> None:
    """transformers would read every batch back from the device to look for it."""
    assert resolve("gpt2").for_tokenizer(byte_tokenizer()).config.pad_token_id is None


def test_roberta_has_fewer_positions_than_embeddings() -> None:
    assert resolve("roberta-base").max_positions == 512


def test_the_fingerprint_is_the_architecture_and_the_task(tmp_path: Path) -> None:
    same, again, *others = (
        resolve(*each).fingerprint()
        for each in (("gpt2",), ("gpt2",), ("gpt2-medium",), ("gpt2", "sequence-classification"))
    )
    assert same == again and len({same, *others}) == 3
    tiny_gpt2().save_pretrained(tmp_path / "saved")
    (tmp_path / "copy.json").write_text((tmp_path / "saved/config.json").read_text())
    assert resolve(str(tmp_path / "saved")).fingerprint() == resolve("copy.json").fingerprint()


def test_one_model_with_two_kinds_of_padding_has_one_objective_for_each() -> None:
    assert resolve("roberta-base").objective().pad_id == 1
    assert resolve("roberta-base").objective(byte_tokenizer()).pad_id == 0


class Legacy(nn.Module):
    """Parameters and buffers as they were made before torch had a default device; one has two names."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = self.again = nn.Parameter(torch.Tensor(width))
        nn.init.normal_(self.weight)
        self.frozen = nn.Parameter(torch.LongTensor([3, 1]), requires_grad=False)
        self.register_buffer("scale", torch.FloatTensor(4).fill_(2))
        self.layers = nn.ParameterList([nn.Parameter(torch.from_numpy(np.ones(3)))])


def test_tensors_that_ignore_the_default_device_are_moved_without_host_memory_and_stay_tied() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with factories.on_device(torch.device("meta")):
        model = Legacy(1 << 28)  # 1 GiB, on which `normal_` writes otherwise
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10  # KiB
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert model.weight is model.again
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, True]
    assert not nn.Linear(2, 2).weight.is_meta  # the hooks are gone
    with factories.on_device(torch.device("cpu")):
        assert Legacy().scale.tolist() == [2.0] * 4


def test_a_small_diffllama_is_on_meta_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "diffllama", **TINY["llama"], "num_key_value_heads": 2})
    )
    model = resolve("config.json").build(dtype=torch.bfloat16, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
