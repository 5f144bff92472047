"""Templates of strangers: what runs or grows without end is ended with a message, in this process nothing happens."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from frugal.data import corpus
from frugal.data import tokenizer as tokenizing
from frugal.data.chat import formats
from frugal.data.chat import template as rendering
from frugal.data.chat.template import ChatTemplate
from frugal.data.rows import BadRow
from frugal.data.tokenizer import load_tokenizer
from frugal.errors import RequestError
from tests.corpora import load_corpus

CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
HINT = "hint: give the template that the model was trained with: --chat-template FILE"


def read(folder: Path, template: str, chats: int = 3) -> corpus.Corpus:
    tokenizer = copy.deepcopy(load_tokenizer())
    tokenizer.chat_template = template
    (folder / "chats.jsonl").write_text((json.dumps(CHAT) + "\n") * chats)
    return load_corpus(
        [str(folder / "chats.jsonl")], tokenizer=tokenizer, task="causal-lm", seq_len=256, cache_dir=folder / "cache"
    )


@pytest.fixture(autouse=True)
def no_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 1.0)
    rendering.end_all()


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
POWER = "{% set n = 9 ** 9 ** 9 %}"
DOUBLED = "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}"
MANY = "{% for i in range(99999) %}{{ 'x' * 10 ** 6 }}{% endfor %}"


RUNS, WRITES = ("does not come to an end", "1 s"), ("writes without end", "1.00 GiB of memory")
RARE = [
    (POWER, *RUNS),
    *((each, *WRITES) for each in (
        DOUBLED, MANY, "{{ '%10000000000d' % 1 }}", "{{ 'x' | center(10 ** 10) }}", "{{ 'x'.ljust(10 ** 10) }}"
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "what", "taken"),
    [(NESTED, *RUNS), ("{{ 'x' * 10 ** 10 }}", *WRITES),
     *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in RARE)],
)  # fmt: skip
def test_a_template_that_runs_or_writes_without_end_is_ended(
    template: str, what: str, taken: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as raised:
        read(tmp_path, template)
    assert str(raised.value) == (
        f"the chat template {what}\n"
        f"  because {tmp_path}/chats.jsonl:1: one chat of 7 characters has taken {taken}\n\n{HINT}"
    )


@pytest.mark.parametrize(
    "template", ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% for i in range(10 ** 9) %}{% endfor %}"]
)
def test_what_jinja_refuses_is_a_row_that_cannot_be_read(template: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the chat template refuses it: "):
        read(tmp_path, template)


def test_one_process_renders_all_chats_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    forked: list[int] = []
    monkeypatch.setattr(os, "fork", lambda fork=os.fork: forked.append(pid := fork()) or pid)
    assert read(tmp_path, template, chats=5).report.samples == 5
    assert len(forked) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(forked[0], 0)


def test_a_long_chat_may_take_as_long_as_its_many_turns_are_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without marks each turn is tokenised twice with all before it, one text at a time."""
    turns = [{"role": role, "content": "ab" * 50} for _ in range(40) for role in ("user", "assistant")]
    tokenizer = copy.deepcopy(load_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant{% endif %}"
    chat = formats.read({"messages": turns}, "messages")
    assert isinstance(chat, formats.Chat)
    assert rendering._seconds(chat) == pytest.approx(1.0 + 41 * 8000 * rendering.SECONDS_PER_CHARACTER)
    sizes: list[int] = []
    encode = tokenizing.encode

    def noted(tokenizer: Any, texts: Any, **how: Any) -> Any:
        sizes.append(sum(map(len, texts)))
        return encode(tokenizer, texts, **how)

    monkeypatch.setattr(tokenizing, "encode", noted)
    result = ChatTemplate(tokenizer, "x").encode(chat, "x:1", train_on_all=False)
    assert not isinstance(result, BadRow) and result[1].sum() == 40 * 100
    assert max(sizes) == 8000 + 40 * len("userassistant")
