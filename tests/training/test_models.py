"""Models by name, file or factory, and what is said when there is none."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from frugal.errors import RequestError
from frugal.training import hub, model_spec
from frugal.training.loss import SummedLoss
from frugal.training.model_spec import check_sequence_length, heads
from frugal.training.models import presets, resolve
from frugal.training.objectives import CausalLM, MaskedLM, Seq2Seq, SequenceClassification
from frugal.training.tokenizing import byte_tokenizer
from tests.training.models import TINY, tiny_gpt2


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def message(reference: str, task: str | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        resolve(reference, task)
    return str(caught.value)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, and a working folder of its own."""
    monkeypatch.setattr(hub, "unreachable_because", lambda: "HF_HUB_OFFLINE is set")
    monkeypatch.chdir(tmp_path)


# What a reference may be.


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    model = resolve(name).build(dtype=torch.bfloat16, device="meta")
    assert parameters(model) == presets()[name]["parameters"]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_says_where_its_numbers_come_from(name: str) -> None:
    assert presets()[name]["source"].startswith("https://")


def test_a_model_type_is_its_default_configuration() -> None:
    spec = resolve("gpt_neo")
    assert (spec.task, spec.vocab_size, spec.max_positions) == ("causal-lm", 50257, 2048)


def test_a_config_file_is_a_model_with_random_weights(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps({"model_type": "bert", **TINY["bert"]}))
    spec = resolve("small.json")
    assert (spec.task, spec.vocab_size, spec.max_positions, spec.weights) == ("masked-lm", 256, 128, None)
    assert parameters(spec.build(dtype=torch.float32)) > 0


def test_a_model_folder_brings_its_weights(tmp_path: Path) -> None:
    model = tiny_gpt2(seed=3)
    model.save_pretrained(tmp_path / "saved")
    loaded = resolve(str(tmp_path / "saved")).build(dtype=torch.float32, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert loaded.training


def test_on_meta_the_weights_of_a_folder_are_not_read(tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/model.safetensors").write_bytes(b"nonsense")
    model = resolve(str(tmp_path / "saved")).build(dtype=torch.float32, device="meta")
    assert next(model.parameters()).is_meta


FACTORIES = """
import torch
from torch import nn
from frugal.training.loss import SummedLoss

def mine():
    loss = lambda model, batch: model(batch["x"]).sum()
    return nn.Linear(4, 1), SummedLoss(loss, example={"x": torch.zeros(4)})

def module_only():
    return nn.Linear(4, 1)

def language_model():
    from tests.training.models import tiny_gpt2
    return tiny_gpt2()

def fails():
    return {}["layers"]

def exits():
    raise SystemExit(3)

def no_module():
    return 42

def nothing():
    pass

SIZE = 3
"""


@pytest.fixture
def factories(tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text(FACTORIES)


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


@pytest.mark.usefixtures("factories")
def test_an_example_that_a_factory_makes_on_meta_has_values() -> None:
    objective = resolve("my_models.py:mine").objective()
    for batch in (objective.collate([objective.dummy()]), objective.example(2, 8)):
        assert torch.equal(batch["x"], torch.zeros(len(batch["x"]), 4))


@pytest.mark.usefixtures("factories")
def test_a_factory_of_a_transformers_model_needs_no_objective() -> None:
    spec = resolve("my_models.py:language_model")
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
def test_the_task_is_what_the_architecture_is_for_unless_said(reference: str, task: str | None, inferred: str) -> None:
    assert resolve(reference, task).task == inferred


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


@pytest.mark.parametrize(
    ("reference", "task", "kind"),
    [
        ("gpt2", None, CausalLM),
        ("bert-base", None, MaskedLM),
        ("t5-small", None, Seq2Seq),
        ("gpt2", "sequence-classification", SequenceClassification),
    ],
)
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_the_objective_is_that_of_the_task(reference: str, task: str | None, kind: type, with_tokenizer: bool) -> None:
    assert isinstance(resolve(reference, task).objective(byte_tokenizer() if with_tokenizer else None), kind)


def test_a_model_has_as_many_classes_as_asked(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps({"model_type": "bert", **TINY["bert"]}))
    model = resolve("small.json", "sequence-classification", num_labels=5).build(dtype=torch.float32)
    assert model.classifier.out_features == 5


def test_a_model_grows_to_the_classes_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps({"model_type": "bert", **TINY["bert"]}))
    spec = resolve("small.json", "sequence-classification")
    assert spec.for_labels(7).build(dtype=torch.float32).classifier.out_features == 7
    assert spec.for_labels(2) is spec
    assert spec.for_labels(7).fingerprint() == spec.fingerprint()


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


REMOTE_CODE = """
from transformers import GPT2Config, GPT2LMHeadModel

class Config(GPT2Config):
    model_type = "mine"

class Model(GPT2LMHeadModel):
    config_class = Config
"""


def test_code_that_comes_with_a_model_runs_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/code.py").write_text(REMOTE_CODE)
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config = {**TINY["gpt2"], "model_type": "mine", "auto_map": auto_map}
    (tmp_path / "mine/config.json").write_text(json.dumps(config))
    spec = resolve("./mine", trust_remote_code=True)
    assert (spec.task, spec.max_positions) == ("causal-lm", 128)
    assert type(spec.build(dtype=torch.float32)).__name__ == "Model"


def test_roberta_has_fewer_positions_than_embeddings() -> None:
    assert resolve("roberta-base").max_positions == 512


def test_the_fingerprint_is_the_architecture_and_the_task(tmp_path: Path) -> None:
    gpt2 = resolve("gpt2").fingerprint()
    assert resolve("gpt2").fingerprint() == gpt2
    others = {resolve("gpt2-medium").fingerprint(), resolve("gpt2", "sequence-classification").fingerprint()}
    assert gpt2 not in others
    assert len(others) == 2


def test_the_fingerprint_of_a_saved_model_is_that_of_its_configuration(tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "saved")
    (tmp_path / "copy.json").write_text((tmp_path / "saved/config.json").read_text())
    assert resolve(str(tmp_path / "saved")).fingerprint() == resolve("copy.json").fingerprint()


def test_one_model_with_two_kinds_of_padding_has_one_objective_for_each() -> None:
    assert resolve("roberta-base").objective().pad_id == 1
    assert resolve("roberta-base").objective(byte_tokenizer()).pad_id == 0


# What is refused.


def test_a_misspelt_model_is_answered_with_similar_names() -> None:
    assert message("gtp2-xl") == (
        "there is no model `gtp2-xl`\n"
        "  because it is no preset, no transformers model type, no path and no factory\n"
        "  because the hub cannot be asked (HF_HUB_OFFLINE is set), and its local cache does not have it\n"
        "\n"
        "hint: did you mean gpt2-xl?"
    )


def test_a_model_like_no_other_is_answered_with_what_could_be_given() -> None:
    assert message("somebody/zzzzzz") == (
        "there is no model `somebody/zzzzzz`\n"
        "  because it is no preset, no transformers model type, no path and no factory\n"
        "  because the hub cannot be asked (HF_HUB_OFFLINE is set), and its local cache does not have it\n"
        "\n"
        "hint: give a preset such as gpt2 or llama-3.1-8b, a config.json, a model folder, or package.module:factory"
    )


def test_a_path_without_a_model_is_not_looked_up_on_the_hub() -> None:
    assert message("runs/nope/config.json") == (
        "there is no model at runs/nope/config.json\n"
        "\n"
        "hint: give a config.json, a model folder, or a preset such as gpt2"
    )


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert message("./empty") == ("./empty is no model folder\n  because empty/config.json: No such file or directory")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"model_type": ',
            "config.json is not a model's configuration\n"
            "  because it is no JSON: Expecting value: line 1 column 16 (char 15)",
        ),
        (
            "[1]",
            "config.json is not a model's configuration\n"
            "  because it has no `model_type`\n"
            "\n"
            'hint: add one that transformers knows, such as "model_type": "gpt2"',
        ),
        (
            '{"model_type": "gtp2"}',
            "transformers does not know the model type `gtp2` of config.json\n\nhint: did you mean gpt2 or tipsv2?",
        ),
        (
            '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}',
            "transformers does not know the model type `mine` of config.json\n"
            "  because the code that comes with a model runs only if asked\n"
            "\n"
            "hint: did you mean zamba or kimi_linear?",
        ),
    ],
)
def test_a_broken_configuration(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    if "auto_map" in text:  # which names are similar is not the claim
        assert message("config.json").startswith(said.rpartition("\n\n")[0])
    else:
        assert message("config.json") == said


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (
            "no_such_module:make",
            "cannot import no_such_module\n"
            "  because ModuleNotFoundError: No module named 'no_such_module'\n"
            "\n"
            "hint: a factory is package.module:name or path/to/file.py:name",
        ),
        ("my_models.py:mime", "my_models.py has no `mime`\n\nhint: did you mean my_models.py:mine?"),
        ("my_models.py:SIZE", "my_models.py:SIZE cannot be called\n  because its type is int"),
        (
            "my_models.py:fails",
            "my_models.py:fails failed\n"
            "  because KeyError: 'layers'\n"
            "\n"
            "hint: it is also called with torch.device('meta') as default, so it must not read weights or values",
        ),
        (
            "my_models.py:exits",
            "my_models.py:exits failed\n"
            "  because SystemExit: 3\n"
            "\n"
            "hint: it is also called with torch.device('meta') as default, so it must not read weights or values",
        ),
        (
            "my_models.py:no_module",
            "my_models.py:no_module returned an object of type int\n"
            "\n"
            "hint: return a torch.nn.Module, or (module, objective)",
        ),
        (
            "my_models.py:nothing",
            "my_models.py:nothing returned None\n\nhint: return a torch.nn.Module, or (module, objective)",
        ),
        (
            "my_models.py:module_only",
            "my_models.py:module_only makes a Linear, but does not say how to train it\n"
            "\n"
            "hint: return (module, objective) from it; frugal.training.loss.SummedLoss makes one of a loss function",
        ),
    ],
)
@pytest.mark.usefixtures("factories")
def test_a_factory_that_makes_no_model(reference: str, said: str) -> None:
    assert message(reference) == said


def test_a_factory_file_that_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\n\nsys.exit()\n")
    assert message("script.py:make") == (
        "cannot import script.py\n"
        "  because SystemExit\n"
        "\n"
        "hint: a factory is package.module:name or path/to/file.py:name"
    )


def test_a_factory_file_that_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def make(:\n")
    assert message("broken.py:make") == (
        "cannot import broken.py\n"
        "  because SyntaxError: invalid syntax (broken.py, line 1)\n"
        "\n"
        "hint: a factory is package.module:name or path/to/file.py:name"
    )


def test_a_task_the_architecture_cannot_do() -> None:
    assert message("gpt2", "masked-lm") == (
        "gpt2 cannot be trained as masked-lm\n"
        "  because transformers has causal-lm and sequence-classification for `gpt2`\n"
        "\n"
        "hint: use --task causal-lm"
    )


def test_a_task_that_does_not_exist() -> None:
    assert message("gpt2", "translation") == (
        "there is no task `translation`\n\nhint: tasks are causal-lm, masked-lm, seq2seq, sequence-classification"
    )


def test_a_model_that_is_not_for_text() -> None:
    assert message("vit") == (
        "vit cannot be trained on text\n"
        "  because transformers has no such model for `vit`\n"
        "\n"
        "hint: give a factory that returns a module and its objective"
    )


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(RequestError) as caught:
        resolve("./saved").build(dtype=torch.float32)
    assert str(caught.value) == (
        "the weights of ./saved cannot be loaded\n"
        "  because SafetensorError: Error while deserializing header: header too large\n"
        "\n"
        "hint: to train from random weights give the path of its config.json"
    )


def test_samples_longer_than_the_positions() -> None:
    check_sequence_length(resolve("gpt2"), 1024)
    check_sequence_length(resolve("t5-small"), 1_000_000)
    with pytest.raises(RequestError) as caught:
        check_sequence_length(resolve("gpt2"), 1025)
    assert str(caught.value) == (
        "--seq-len 1025 is longer than gpt2 can read\n"
        "  because it has 1024 positions\n"
        "\n"
        "hint: use --seq-len 1024 or less"
    )


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps({"model_type": "gpt2", **TINY["gpt2"]}))
    with pytest.raises(RequestError) as caught:
        resolve("small.json").for_tokenizer(byte_tokenizer())
    assert str(caught.value) == (
        "the tokenizer has 260 tokens, small.json has embeddings for 256\n"
        "\n"
        "hint: take the tokenizer that belongs to the model, or a config.json with a larger vocab_size"
    )


def test_an_unreachable_hub_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for retries where the host has no address."""
    asked = []

    def no_address(*arguments: object) -> None:
        asked.append(arguments)
        raise OSError("Name or service not known")

    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", no_address)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    hub.unreachable_because.cache_clear()
    try:
        assert "the network does not reach it" in message("gtp2")
        assert len(asked) == 1
    finally:
        hub.unreachable_because.cache_clear()


def test_every_task_has_its_class_in_transformers() -> None:
    for task in model_spec.TASKS:
        assert heads(task)
