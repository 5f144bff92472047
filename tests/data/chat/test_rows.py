"""Prompts, instructions and tokens: what is trained on, and what rows are."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.training import chat_tokenizers as tokenizers
from frugal.config.run_settings import Format
from frugal.data.chat import formats
from frugal.data.rows import BadRow, Columns
from tests.data.chat.test_chats import CHAT, load_rows, stretches, text  # noqa: F401  # a fixture
from tests.engine.corpora import Load, refusal

KEYS = [
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "input_ids", "labels",
    "attention_mask", "completion_mask", "role", "content", "from", "value", "weight", "tool_calls", "function", "name",
    "arguments", "tools", "system", "type", "text", "chat_template_kwargs",
]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "completion", "trained", "merged"),
    [
        ("What is the capital?", " Paris.", " Paris.", 0),
        ("What is the cap", "ital of France?", " capital of France?", 1),
    ],
    ids=["apart", "a token of both"],
)
def test_a_completion_is_trained_on_with_its_end(
    prompt: str,
    completion: str,
    trained: str,
    merged: int,
    load_rows: Any,  # noqa: F811
) -> None:
    corpus = load_rows({"prompt": prompt, "completion": completion})
    assert text(corpus) == f"{prompt}{completion}<|endoftext|>"
    assert stretches(corpus) == [f"{trained}<|endoftext|>"]
    assert corpus.report.merged_rows == merged


def test_a_text_begins_once_where_the_tokenizer_begins_texts(load_rows: Any) -> None:  # noqa: F811
    tokenizer = tokenizers.llama()
    for prompt in ("What?", "<|begin|>What?"):
        corpus = load_rows({"prompt": prompt, "completion": " Paris.<|eot_id|>"}, tokenizer=tokenizer)
        assert text(corpus, tokenizer) == "<|begin|>What? Paris.<|eot_id|>"
        assert stretches(corpus, tokenizer) == [" Paris.<|eot_id|>"]
    corpus = load_rows({"text": "<|begin|>What? Paris.<|eot_id|>"}, {"text": "What? Paris."}, tokenizer=tokenizer)
    assert corpus.train[0]["input_ids"].tolist() == corpus.train[1]["input_ids"].tolist()


def test_instructions_are_written_as_alpaca_s(load_rows: Any) -> None:  # noqa: F811
    rows = [
        {"instruction": "Answer", "input": "yes", "output": "no"},
        {"instruction": "Answer", "output": "no", "input": ""},
    ]
    corpus = load_rows(*rows)
    assert text(corpus).endswith("### Instruction:\nAnswer\n\n### Input:\nyes\n\n### Response:\nno<|endoftext|>")
    assert text(corpus, sample=1).endswith("request.\n\n### Instruction:\nAnswer\n\n### Response:\nno<|endoftext|>")
    assert [stretches(corpus, sample=i) for i in range(2)] == [["no<|endoftext|>"]] * 2


def test_tokens_come_as_they_are(load_rows: Any) -> None:  # noqa: F811
    rows = [
        {"input_ids": [9, 8, 7, 6], "labels": [-100, 8, -100, 6], "attention_mask": [1, 1, 1, 1]},
        {"input_ids": [5, 5, 9, 8, 0], "labels": [-100, -100, -100, 8, -100], "attention_mask": [0, 0, 1, 1, 0]},
        {"input_ids": [3, 2, 1], "completion_mask": [0, 0, 1]},
        {"input_ids": [3, 2, 1]},
    ]
    train = load_rows(*rows).train
    assert [sample["input_ids"].tolist() for sample in train] == [[9, 8, 7, 6], [9, 8], [3, 2, 1], [3, 2, 1]]
    assert [sample["labels"].tolist() for sample in train[:3]] == [[-100, 8, -100, 6], [-100, 8], [-100, -100, 1]]
    assert "labels" not in train[3]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": "abc"}, "`input_ids` is not a list of whole numbers"),
        ({"input_ids": [1, 2.5]}, "`input_ids` is not a list of whole numbers"),
        ({"input_ids": [1, -5]}, "`input_ids` has -5, which is no token"),
        ({"input_ids": []}, "`input_ids` has no token"),
        ({"input_ids": [1, 2], "labels": [1]}, "`labels` has 1 numbers, `input_ids` has 2"),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, "the label at position 1 is 3: neither -100 nor the token, 2"),
        (
            {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]},
            "`attention_mask` hides tokens between others: only padding can be left out",
        ),
        ({"prompt": "a", "completion": 3}, "`completion`: Expected `str`, got `int`"),
        ({"prompt": ["a"], "completion": [CHAT[2]]}, "`prompt`: Expected `object`, got `str` - at `$[0]`"),
        ({"instruction": "a", "output": None}, "`output`: missing, or null"),
    ],
)
def test_rows_that_cannot_be_read(row: dict[str, Any], reason: str, load_rows: Any) -> None:  # noqa: F811
    assert f"\n  because a.jsonl:1: {reason}\n" in refusal(lambda: load_rows(row))


def test_columns_of_several_formats_are_asked_about(load_rows: Any) -> None:  # noqa: F811
    row = {"messages": CHAT, "text": "one", "id": 3}
    said = refusal(lambda: load_rows(row))
    assert said.startswith(
        "the rows of a.jsonl fit several formats: messages, text\n  because their columns are messages,"
    )
    assert said.endswith("hint: say which one to train on, such as --format messages")
    assert load_rows(row, format="messages").report.formats == {"messages": 1}
    assert load_rows(row, format="text").report.formats == {"text": 1}
    assert load_rows({"messages": CHAT, "body": "one"}, columns=Columns(text="body")).report.formats == {"text": 1}


def test_a_format_that_the_columns_have_not(load_rows: Any) -> None:  # noqa: F811
    said = refusal(lambda: load_rows({"text": "one"}, format="instruction"))
    assert said.startswith("a.jsonl has no column `instruction`\n") and said.endswith("--columns instruction=NAME")
    said = refusal(lambda: load_rows({"text": "one"}, format="messages", task="masked-lm"))
    assert said.startswith("--format messages cannot be read\n  because what is trained is masked-lm;")


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_chats_in_tables(kind: str, load: Load, tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"messages": CHAT, "more": 1}])
    if kind == "parquet":
        rows.to_parquet(str(tmp_path / "a.parquet"))
    else:
        rows.save_to_disk(str(tmp_path / "a"))
    corpus = load("a.parquet" if kind == "parquet" else "a", tokenizer=tokenizers.make(), seq_len=256)
    assert stretches(corpus) == ["Paris.<|im_end|>\n", "Bye, dear user!<|im_end|>\n"]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING), st.sampled_from([f for f in get_args(Format) if f != "text"]))
def test_any_row_is_read_or_named(row: dict[str, Any], kind: Format) -> None:
    """None ends in a traceback."""
    assert isinstance(formats.read(row, kind), formats.Whole | BadRow)


def test_rows_by_marked_templates_are_those_of_trl() -> None:
    """As `python -m bench.training.rows` kept them, which needs TRL."""
    root = Path(__file__).parents[3]
    kept = json.loads((root / "bench/results/rows-cpu.json").read_text())
    assert [(each["format"], each["template"]) for each in kept["formats"] if not each["same"]] == [("text", "chatml")]
    marked = {kind: counts for kind, counts in kept["summary"].items() if kind.startswith("marked")}
    assert marked == {"marked, one turn": {"same": 30}, "marked, two turns": {"same": 30}}
