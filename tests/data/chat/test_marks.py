"""Marks that frugal puts into templates of known families leave what these write, and enclose the assistant's words."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.training import chat_tokenizers as tokenizers
from frugal.data.chat import template as marks
from frugal.data.chat.formats import Chat
from frugal.data.chat.template import ChatTemplate
from frugal.data.rows import BadRow
from tests.engine.corpora import Load, refusal, write_jsonl

OWN = {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.jinja")}

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
"""As Mistral's of version 3: the system's words go to the last turn of the user, if that is the last of all."""

TEMPLATES = OWN | {"mistral": MISTRAL}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


BRIEF = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"city": "Paris"}}}
CHATS = {
    "one turn": [user("a"), says("yes")],
    "several turns": [BRIEF, user("a"), says("yes"), user("b"), says("no")],
    "an empty system prompt": [BRIEF | {"content": ""}, user("a"), says("yes"), user("b"), says("no")],
    "thoughts in the text": [
        user("a"), says("<think>\nhm\n</think>\n\nyes"), user("b"), says("<think>\nho\n</think>\n\nno"),
    ],
    "thoughts beside it": [
        user("a"), says("yes", reasoning_content="hm"), user("b"), says("no", reasoning_content="ho"),
    ],
    "the user has the last word": [user("a"), says("yes"), user("b")],
    "spaces": [user(" a\n"), says("  yes "), user("b"), says("no\n")],
}  # fmt: skip


def rendered(template: str, messages: list[dict[str, Any]], **more: Any) -> Any:
    chat = Chat(messages, tuple(n for n, each in enumerate(messages) if each["role"] == "assistant"), **more)
    return ChatTemplate(tokenizers.make(template), "here").encode(chat, "here", train_on_all=False)


def stretches(template: str, ids: Any, trained: Any) -> list[str]:
    """The text of each stretch that is trained on."""
    borders = np.flatnonzero(np.diff(trained, prepend=False, append=False)).reshape(-1, 2)
    return [tokenizers.make(template).decode(ids[begin:end]) for begin, end in borders]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_the_text_is_the_templates_own_and_the_last_words_of_each_turn_are_trained_on(name: str, chat: str) -> None:
    messages, template = CHATS[chat], TEMPLATES[name]
    tokenizer = tokenizers.make(template)
    ids, trained = rendered(template, messages)
    written = tokenizer.apply_chat_template(messages, tokenize=False)
    assert ids.tolist() == tokenizer(written, add_special_tokens=False)["input_ids"]
    found = stretches(template, ids, trained)
    turns = [each for each in messages if each["role"] == "assistant"]
    assert len(found) == len(turns)
    for stretch, turn in zip(found, turns, strict=True):
        assert turn["content"].split("</think>")[-1].strip() in stretch
        headers = {"<|im_start|>", "<|assistant|>", "[/INST]", "<\uff5cAssistant\uff5c>"}
        assert not headers & set(tokenizer.tokenize(stretch))


def test_of_one_turn_the_marks_are_what_rendering_turn_by_turn_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("qwen3", "phi3_5", "mistral"):
        ids, trained = rendered(TEMPLATES[name], CHATS["one turn"])
        with monkeypatch.context() as without:
            without.setattr(marks, "marked", lambda template: None)
            by_turn = rendered(TEMPLATES[name], CHATS["one turn"])
        assert [each.tolist() for each in by_turn] == [ids.tolist(), trained.tolist()]


def test_qwen_3_marks_what_is_thought_and_calls_of_tools() -> None:
    template = OWN["qwen3"]
    ids, trained = rendered(template, CHATS["thoughts in the text"])
    assert stretches(template, ids, trained) == ["yes<|im_end|>\n", "<think>\nho\n</think>\n\nno<|im_end|>\n"]
    called = [user("a"), says("", tool_calls=[CALL]), {"role": "tool", "content": "rain"}, says("yes")]
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    ids, trained = rendered(template, called, tools=tools)
    first, last = stretches(template, ids, trained)
    assert '{"name": "look_up", "arguments": {"city": "Paris"}}' in first and last.endswith("yes<|im_end|>\n")


def test_a_turn_of_weight_0_is_read_alone() -> None:
    chat = Chat(CHATS["several turns"], (4,))
    template = ChatTemplate(tokenizers.make(OWN["qwen3"]), "here")
    ids, trained = template.encode(chat, "here", train_on_all=False)  # type: ignore[misc]  # no bad row
    assert stretches(OWN["qwen3"], ids, trained) == ["<think>\n\n</think>\n\nno<|im_end|>\n"]


def test_what_is_of_no_known_family_gets_no_marks() -> None:
    for template in (tokenizers.CHATML, tokenizers.MARKED, tokenizers.LLAMA, tokenizers.FORGETFUL):
        assert marks.marked(template) is None

    family, _ = marks.marked(MISTRAL) or (None, "")
    assert family is not None and not family.marks_calls


def test_marks_that_change_what_is_written_refuse_the_row() -> None:
    before, line, after = OWN["qwen3"].rpartition("{{- '<|im_start|>' + message.role + '\\n' + content }}")
    changed = before + "{{- content }}" + after  # earlier turns without their header
    assert line and marks.marked(changed) is not None
    answer = rendered(changed, CHATS["several turns"])
    assert isinstance(answer, BadRow) and "writes something else" in answer.reason


def test_a_run_says_whose_marks_it_takes(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"messages": CHATS["several turns"]}])
    asked = {"seq_len": 256, "tokenizer": tokenizers.make(OWN["qwen3"])}
    report = load("a.jsonl", **asked).report
    assert report.template == (
        "the assistant's tokens are found by marks for templates of Qwen 3, with which it writes the same"
    )
    monkeypatch.setattr(marks, "marked", lambda template: None)
    assert "does not say which tokens are the assistant's" in refusal(lambda: load("a.jsonl", limit=5, **asked))
