"""Columns that have other names, and what is said where one is missing."""

from pathlib import Path
from typing import Any

import pytest

from bench.training import chat_tokenizers as tokenizers
from frugal.data.build import SampleMaker, SampleSettings
from frugal.data.rows import Columns
from tests.data.chat.test_chats import load_rows, stretches, text  # noqa: F401  # a fixture
from tests.engine.corpora import Load, refusal, write_jsonl

USUAL = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "Here."},
]
OWN = [{"who": "customer", "said": "Where is it?", "role": 7}, {"who": "agent", "said": "Here.", "role": 7}]
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("prompt=question,response=reply,system=sys", {"sys": "Be kind.", "question": "Where is it?", "reply": "Here."}),
    (
        "messages=turns,role=who,content=said,user=customer,assistant=agent,system=sys",
        {"turns": OWN, "sys": "Be kind.", "messages": "of no use"},
    ),
    ("conversations=turns,role=who,content=said,user=customer,assistant=agent", {"turns": OWN, "system": "Be kind."}),
    (
        "prompt=turns,completion=reply,role=who,content=said,user=customer,assistant=agent,system=sys",
        {"turns": [{"who": "system", "said": "Be kind."}, *OWN[:1]], "reply": OWN[1:]},
    ),
]


def columns(given: str) -> Columns:
    return Columns.of(dict(part.split("=") for part in given.split(",")))


@pytest.mark.parametrize(("given", "row"), ROWS)
def test_a_chat_under_other_names_is_the_same_chat(given: str, row: dict[str, Any], load_rows: Any) -> None:  # noqa: F811
    tokenizer = tokenizers.make()
    usual = load_rows({"messages": USUAL}, tokenizer=tokenizer)
    own = load_rows(row, tokenizer=tokenizer, columns=columns(given))
    assert text(own, tokenizer) == text(usual, tokenizer)
    assert stretches(own, tokenizer) == stretches(usual, tokenizer) == ["Here.<|im_end|>\n"]


def test_prompt_and_response_are_known_by_their_usual_names_too_unless_the_rows_fit_another_format() -> None:
    maker = SampleMaker(tokenizers.make(), SampleSettings(task="causal-lm", seq_len=64))
    formats = {}
    for there in ("prompt response", "prompt response text", "prompt completion response", "question text"):
        maker.check_columns("a", there.split())
        formats[there] = maker.format
    assert list(formats.values()) == ["prompt-response", "text", "prompt-completion", "text"]


def test_a_named_column_that_is_not_there_or_not_read_is_refused(load_rows: Any) -> None:  # noqa: F811
    said = refusal(lambda: load_rows({"q": "x", "reply": "y"}, columns=columns("prompt=question,response=reply")))
    assert said.startswith("a.jsonl has no column `question`\n  because its columns are q, reply\n")
    said = refusal(lambda: load_rows({"q": "x", "a": "y", "s": "z"}, columns=columns("prompt=q,completion=a,system=s")))
    assert said.startswith("--columns system=s says nothing of the rows of a.jsonl\n  because read as prompt-")


def test_running_text_is_named_where_others_are_not_or_its_name_does_not_say_it_and_a_readme_beside_rows_is_none(
    load: Load, tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/README.md").write_text("About this.")
    assert "running text" not in load("d").report.in_words()
    (tmp_path / "d/chat.jsonl.bak").write_text('{"prompt": "a", "completion": "b"}\n')
    assert "(read as running text: d/chat.jsonl.bak)" in load("d").report.in_words()
    write_jsonl(tmp_path / "d/chat.jsonl", [{"prompt": "a", "completion": "b"}])
    (tmp_path / "d/notes.md").write_text("Read as well.")
    report = load("d").report
    assert "(read as running text: d/chat.jsonl.bak, d/notes.md)" in report.in_words() and report.documents == 3
    assert load("d/README.md").report.documents == 1
