"""Models that cannot be had, and what is said instead."""

import json
from pathlib import Path

import pytest
import torch

from frugal.errors import RequestError
from frugal.training.data.tokenizer import byte_tokenizer
from frugal.training.models import factories
from frugal.training.models.resolve import resolve
from frugal.training.models.spec import check_sequence_length
from tests.training.small_models import TINY, tiny_gpt2

pytestmark = pytest.mark.usefixtures("offline")


def message(reference: str, task: str | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        resolve(reference, task)
    return str(caught.value)


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
            "  because frugal never runs the code that comes with a model\n"
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
            "hint: return (module, objective) from it; frugal.training.objectives.SummedLoss makes one of a loss "
            "function",
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
        "hint: give a factory that returns a module and its objective, see docs/tutorials/own-model.md"
    )


@pytest.mark.parametrize("task", [None, "causal-lm"])
def test_a_model_of_speech_is_not_its_decoder(task: str | None) -> None:
    assert message("whisper", task) == (
        "whisper cannot be trained on text\n"
        "  because WhisperModel reads `input_features`; as a language model it would be its decoder alone\n"
        "\n"
        "hint: give a factory that returns the module and its objective, see docs/tutorials/own-model.md"
    )


def test_a_model_of_several_has_no_text_of_its_own() -> None:
    assert message("musicgen").startswith(
        "musicgen is no single model for text\n  because ValueError: Multiple valid text configs were found"
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
    lookups = []

    def no_address(*arguments: object) -> None:
        lookups.append(arguments)
        raise OSError("Name or service not known")

    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", no_address)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    factories.hub_unreachable_because.cache_clear()
    try:
        assert "the network does not reach it" in message("gtp2")
        assert len(lookups) == 1
    finally:
        factories.hub_unreachable_because.cache_clear()
