"""Templates of strangers: what Jinja refuses is a row with a reason; long chats take the memory of one turn."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from frugal.data import corpus
from frugal.data import tokenizer as tokenizing
from frugal.data.chat import formats
from frugal.data.chat.template import ChatTemplate
from frugal.data.rows import BadRow
from frugal.data.tokenizer import load_tokenizer
from frugal.errors import RequestError
from tests.corpora import load_corpus

CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}


def read(folder: Path, template: str, chats: int = 3) -> corpus.Corpus:
    tokenizer = copy.deepcopy(load_tokenizer())
    tokenizer.chat_template = template
    (folder / "chats.jsonl").write_text((json.dumps(CHAT) + "\n") * chats)
    return load_corpus(
        [str(folder / "chats.jsonl")], tokenizer=tokenizer, task="causal-lm", seq_len=256, cache_dir=folder / "cache"
    )


@pytest.mark.parametrize(
    "template", ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% for i in range(10 ** 9) %}{% endfor %}"]
)
def test_what_jinja_refuses_is_a_row_that_cannot_be_read(template: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the chat template refuses it: "):
        read(tmp_path, template)


def test_turns_of_a_long_chat_are_tokenised_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without marks each turn is tokenised twice with all before it, one text at a time."""
    turns = [{"role": role, "content": "ab" * 50} for _ in range(40) for role in ("user", "assistant")]
    tokenizer = copy.deepcopy(load_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant{% endif %}"
    chat = formats.read({"messages": turns}, "messages")
    assert isinstance(chat, formats.Chat)
    sizes: list[int] = []
    encode = tokenizing.encode

    def noted(tokenizer: Any, texts: Any, **how: Any) -> Any:
        sizes.append(sum(map(len, texts)))
        return encode(tokenizer, texts, **how)

    monkeypatch.setattr(tokenizing, "encode", noted)
    result = ChatTemplate(tokenizer, "x").encode(chat, "x:1", train_on_all=False)
    assert not isinstance(result, BadRow) and result[1].sum() == 40 * 100
    assert max(sizes) == 8000 + 40 * len("userassistant")
