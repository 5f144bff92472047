"""`frugal train --preview` shows what is trained on, and starts nothing."""

import json
from pathlib import Path

import pytest

from bench.training import chat_tokenizers as tokenizers
from frugal import cli
from tests.commands import Capture
from tests.engine.corpora import write_jsonl

CHAT = [{"role": "user", "content": "What is the capital?"}, {"role": "assistant", "content": "Paris, dear ü."}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's configuration, a tokenizer with a template, and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizers.make().save_pretrained("tokens")
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 1, "vocab_size": 512}
    Path("model.json").write_text(json.dumps(config))
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": CHAT}] * 20)
    write_jsonl(tmp_path / "pairs.jsonl", [{"source": "one", "target": "two"}] * 20)
    return tmp_path


def shown(capsys: Capture, *words: str) -> list[str]:
    given = ["--model", "model.json", "--tokenizer", "tokens", "--seq-len", "64", "--out", "run"]
    assert cli.run(["train", *given, *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_what_is_trained_on_is_marked(folder: Path, capsys: Capture) -> None:
    lines = shown(capsys, "--data", "chat.jsonl", "--preview", "2")
    text = tokenizers.make().apply_chat_template(CHAT, tokenize=False)
    tokens = len(tokenizers.make()(text)["input_ids"])
    targets = len(tokenizers.make()("Paris, dear ü.<|im_end|>\n")["input_ids"])
    sample = text.replace("Paris", ">>>Paris") + "<<<"
    assert lines[0] == f"{len(tokenizers.make())} tokens of tokens"
    assert lines[1].startswith("20 rows of messages (the assistant's tokens are found by rendering it turn by turn); ")
    assert lines[2] == ">>>trained on<<<, context only"
    assert (
        "\n".join(lines[4 : 5 + sample.count("\n") + 1])
        == f"sample 1 of 19: {tokens} tokens, {targets} trained on\n{sample}"
    )
    assert sum(line.startswith("sample ") for line in lines) == 2
    assert not (folder / "run").exists()


def test_packed_documents_are_shown_apart(folder: Path, capsys: Capture) -> None:
    lines = shown(capsys, "--data", "chat.jsonl", "--pack", "--preview", "1")
    assert lines[4].startswith("sample 1 of ") and " in 2 documents, " in lines[4]
    assert lines.count("<|im_start|>user") == 2


def test_on_a_terminal_it_is_green(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    said = "\n".join(shown(capsys, "--data", "chat.jsonl", "--preview", "1"))
    assert "\x1b[32mParis, dear ü.\x1b[0m\x1b[32m\x1b[1m<|im_end|>\x1b[0m" in said
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in "\n".join(shown(capsys, "--data", "chat.jsonl", "--preview", "1"))


def test_running_text_is_trained_on_but_for_its_first_token(folder: Path, capsys: Capture) -> None:
    (folder / "a.txt").write_text("one")
    lines = shown(capsys, "--data", "a.txt", "--validation-data", "0%", "--preview", "5")
    assert lines[-1] == "<|endoftext|>>>>one<|endoftext|><<<"


def test_of_pairs_the_target_is_trained_on(folder: Path, capsys: Capture) -> None:
    config = {"model_type": "t5", "num_layers": 1, "d_model": 16, "num_heads": 1, "vocab_size": 512}
    Path("model.json").write_text(json.dumps(config))
    lines = shown(capsys, "--data", "pairs.jsonl", "--preview", "1")
    assert lines[-2:] == ["one<|endoftext|>", ">>>two<|endoftext|><<<"]
