"""`frugal train --model FOLDER`: a pretrained model keeps its tokens, its template and its way to generate."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.runs import PINNED, frugal_train
from frugal import cli
from frugal.errors import RequestError
from frugal.models.resolve import resolve
from frugal.units import parse_bytes
from tests.commands import Capture

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
TEXTS = [f"line {n} of what a model may learn about the number {n * n}" for n in range(120)]
ONE = ("--device", "cpu", "--gpus", 1, "--mem", "4G")
RUN = (*ONE, "--global-batch", 4, "--seq-len", 32, "--steps", 2, "--data", "text.jsonl", *PINNED)


def subword_tokenizer() -> Any:
    """Trained on `TEXTS` on the spot, by the library that fast tokenizers are made with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>", "<|user|>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained Llama in `chat`, its configuration alone in `config.json`, and text."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("fine-tuning")
    tokenizer = subword_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 4, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=[1, 2],
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(temperature=0.6, top_p=0.9, do_sample=True, eos_token_id=[1, 2])
    model.save_pretrained(folder / "chat")
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder / "chat")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> str:
    """Return what a run from the pretrained folder prints."""
    code, output, errors = frugal_train(folder, *RUN, "--model", "chat", "--out", "run")
    assert (code, errors) == (0, "")
    return output


def test_the_first_line_says_where_weights_and_tokens_are_from(folder: Path, trained: str) -> None:
    said = (folder / "run" / "logs" / "rank_0.log").read_text().splitlines()[0]
    assert said == f"pretrained weights from chat; {len(subword_tokenizer())} tokens of chat"
    assert said in trained


def test_the_trained_folder_has_tokenizer_template_and_generation_as_they_came(folder: Path, trained: str) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    before, after = folder / "chat", folder / "run" / "model"
    given, saved = (AutoTokenizer.from_pretrained(each) for each in (before, after))
    assert saved(TEXTS)["input_ids"] == given(TEXTS)["input_ids"]
    message = [{"role": "user", "content": "hello"}]
    assert saved.apply_chat_template(message, tokenize=False) == "<|user|>hello"
    assert (
        GenerationConfig.from_pretrained(after).to_diff_dict()
        == GenerationConfig.from_pretrained(before).to_diff_dict()
    )
    first, second = (json.loads((each / "config.json").read_text()) for each in (before, after))
    assert {name for name in first if first[name] != second.get(name)} <= {"dtype", "transformers_version"}


def test_training_began_at_the_pretrained_weights(folder: Path, trained: str) -> None:
    from safetensors.torch import load_file

    before, after = (load_file(folder / each / "model.safetensors") for each in ("chat", "run/model"))
    moved = [(before[name].float() - after[name].float()).norm() / before[name].float().norm() for name in before]
    assert 0 < max(moved) < 0.2, "random weights of another seed would be 1.4 away"


@pytest.fixture
def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Callable[..., str]:
    """Return what is said in the folder to a request that cannot be right."""

    def refused(*words: object) -> str:
        assert cli.run(["train", *map(str, words)]) == 2
        return capsys.readouterr().err

    monkeypatch.chdir(folder)
    return refused


def test_no_data_is_refused(folder: Path, refusal: Callable[..., str]) -> None:
    said = refusal("--model", "chat", *ONE, "--out", "none")
    assert said.startswith("error: no data was given\n") and "--data PATH" in said
    assert not (folder / "none").exists()


def test_pretrained_weights_without_a_tokenizer_are_refused(folder: Path, refusal: Callable[..., str]) -> None:
    (folder / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "bare" / name).write_bytes((folder / "chat" / name).read_bytes())
    said = refusal(*RUN, "--model", "bare", "--out", "none")
    assert said.startswith("error: bare has pretrained weights, and no tokenizer\n")
    assert "--tokenizer NAME, or --tokenizer byte" in said


def test_weights_of_another_model_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    monkeypatch.chdir(folder)
    shutil.copytree(folder / "chat", folder / "other")
    weights = load_file("other/model.safetensors")
    wrapped = {f"wrapped.{name}": tensor for name, tensor in weights.items()}
    save_file(wrapped, "other/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match="the weights in other are those of another model") as refused:
        resolve("other").build(dtype=torch.float32)
    assert refused.value.because == ("of 40,096 parameters they lack 40,096, such as lm_head.weight",)


@pytest.mark.exhaustive
def test_loading_that_a_host_has_no_memory_for_is_no_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """With what it takes and what would do, by exit code 3; nothing is written."""
    monkeypatch.chdir(folder)
    asked = (*RUN[2:], "--zero-stage", 3, "--model", "chat", "--lora", "r=4", "--gpus", 2, "--gpu", "rtx3060-12g")
    assert cli.run(["plan", *map(str, asked), "--host-mem", "8M", "-o", "too-large"]) == 3
    errors = capsys.readouterr().err
    assert errors.startswith(
        "error: chat does not fit into a node's host memory\n  because on the GPUs alone ZeRO-3 lacks "
    )
    reason = "before the first step each rank reads pretrained weights tensor by tensor, which takes (.*) of a host"
    assert (needed := re.search(rf"\n  because {reason}\n", errors)) is not None, errors
    assert (hint := re.search(r"\n\nhint: this would fit: --host-mem (\w+)\n$", errors)) is not None, errors
    assert parse_bytes("8M") < parse_bytes(needed[1].replace(" ", "")) <= parse_bytes(hint[1])
    assert not (folder / "too-large").exists()
