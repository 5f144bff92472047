"""Chats become the tokens of their template, and what the assistant writes is trained on."""

import copy
from pathlib import Path
from typing import Any

import pytest

from bench.training import chat_tokenizers as tokenizers
from frugal.config.run_settings import RunSettings
from frugal.data import corpus as corpus_module
from frugal.data.chat import template as template_module
from frugal.data.chat.template import read_template
from frugal.data.corpus import Corpus
from frugal.models.spec import ModelSpec
from tests.engine.corpora import Load, refusal, write_jsonl

USER, ANSWER = {"role": "user", "content": "What is the capital?"}, {"role": "assistant", "content": "Paris."}
SYSTEM = {"role": "system", "content": "You are helpful."}
MORE, BYE = {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Bye, dear user!"}
CHAT = [SYSTEM, USER, ANSWER, MORE, BYE]


@pytest.fixture
def load_rows(load: Load, tmp_path: Path) -> Any:
    """The corpus of some rows."""

    def load_rows(*rows: Any, tokenizer: Any = None, seq_len: int = 256, **options: Any) -> Corpus:
        write_jsonl(tmp_path / "a.jsonl", list(rows))
        return load("a.jsonl", tokenizer=tokenizer or tokenizers.make(), seq_len=seq_len, **options)

    return load_rows


def stretches(corpus: Corpus, tokenizer: Any = None, sample: int = 0) -> list[str]:
    """The text of each stretch of tokens that is trained on, one after another."""
    row = corpus.train[sample]
    labels = row.get("labels", row["input_ids"]).tolist()
    texts, stretch = [], []
    for label in [*labels, -100]:
        if label >= 0:
            stretch.append(label)
        elif stretch:
            texts.append((tokenizer or tokenizers.make()).decode(stretch))
            stretch = []
    return texts


def text(corpus: Corpus, tokenizer: Any = None, sample: int = 0) -> str:
    return str((tokenizer or tokenizers.make()).decode(corpus.train[sample]["input_ids"]))


def test_every_turn_of_the_assistant_is_trained_on_with_its_end(load_rows: Any) -> None:
    corpus = load_rows({"messages": CHAT})
    assert text(corpus) == tokenizers.make().apply_chat_template(CHAT, tokenize=False)
    assert stretches(corpus) == ["Paris.<|im_end|>\n", "Bye, dear user!<|im_end|>\n"]
    assert corpus.report.formats == {"messages": 1}
    assert corpus.report.template == "the assistant's tokens are found by rendering it turn by turn"
    assert corpus.report.targets == sum(label >= 0 for label in corpus.train[0]["labels"])


def test_a_template_that_marks_the_assistant_gives_the_same_and_an_end_that_it_leaves_out_is_said(
    load_rows: Any,
) -> None:
    plain, marked = (
        load_rows({"messages": CHAT}, tokenizer=tokenizers.make(t)) for t in (tokenizers.CHATML, tokenizers.MARKED)
    )
    by_marks = "the assistant's tokens are marked by its {% generation %}"
    assert marked.report.template == by_marks
    for name in ("input_ids", "labels"):
        assert marked.train[0][name].tolist() == plain.train[0][name].tolist()
    template = tokenizers.MARKED.replace("+ '<|im_end|>\n' }}{% endgeneration %}", "}}{% endgeneration %}<|im_end|>\n")
    corpus = load_rows({"messages": CHAT}, tokenizer=tokenizers.make(template))
    assert stretches(corpus) == ["Paris.", "Bye, dear user!"]
    said = "and <|im_end|> after them is not: a model does not learn to end its turn by it"
    assert corpus.report.template == f"{by_marks}, {said}"


def test_a_template_that_asks_for_the_day_is_told_always_the_same(load_rows: Any) -> None:
    """As Llama 3.1's does."""
    template = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}" + tokenizers.CHATML
    tokenizer = tokenizers.make(template)
    assert text(load_rows({"messages": CHAT}, tokenizer=tokenizer)).startswith("26 Jul 2024<|im_start|>")
    row = {"messages": CHAT, "chat_template_kwargs": {"date_string": "today"}}
    assert text(load_rows(row, tokenizer=tokenizer)).startswith("today<|im_start|>")


@pytest.mark.parametrize(
    ("name", "made", "end"), [("chatml", tokenizers.make, "<|im_end|>"), ("llama3", tokenizers.llama, "<|eot_id|>")]
)
def test_built_in_templates(name: str, made: Any, end: str, load_rows: Any) -> None:
    tokenizer = copy.deepcopy(made())
    tokenizer.chat_template = read_template(name)
    corpus, expected = (load_rows({"messages": CHAT}, tokenizer=each) for each in (tokenizer, made()))
    assert corpus.train[0]["input_ids"].tolist() == expected.train[0]["input_ids"].tolist()
    assert stretches(corpus, tokenizer) == [f"Paris.{end}", f"Bye, dear user!{end}"]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": "Paris."}]},
        {"conversations": [USER, ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is the "}, "capital?"]}, ANSWER]},
        {"prompt": [USER], "completion": [ANSWER]},
        {"messages": [USER | {"name": None}, ANSWER], "prompt": "not this"},
    ],
)  # fmt: skip
def test_other_ways_to_write_a_chat(row: dict[str, Any], load_rows: Any) -> None:
    corpus = load_rows(row)
    assert text(corpus) == tokenizers.make().apply_chat_template([USER, ANSWER], tokenize=False)
    assert stretches(corpus) == ["Paris.<|im_end|>\n"]


def test_only_turns_that_are_asked_for_are_trained_on(load_rows: Any) -> None:
    weighted = {"messages": [USER, ANSWER | {"weight": 0}, MORE, BYE | {"weight": 1}]}
    for row, template in (
        ({"prompt": [SYSTEM, USER, ANSWER, MORE], "completion": [BYE]}, tokenizers.CHATML),
        (weighted, tokenizers.CHATML),
        (weighted, tokenizers.MARKED),
    ):
        assert stretches(load_rows(row, tokenizer=tokenizers.make(template))) == ["Bye, dear user!<|im_end|>\n"]
    corpus = load_rows({"messages": CHAT}, train_on="all")
    assert "labels" not in corpus.train[0]
    assert stretches(corpus) == [tokenizers.make().apply_chat_template(CHAT, tokenize=False)]


TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function.arguments.city }}{% endfor %}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_calls_reach_the_template(as_text: bool, load_rows: Any) -> None:
    tokenizer = tokenizers.make(TOOLS)
    arguments = '{"city": "Paris"}' if as_text else {"city": "Paris"}
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    tools = '[{"name": "f"}]' if as_text else [{"name": "f"}]
    messages = [USER, call, {"role": "tool", "content": "sun"}, BYE]
    corpus = load_rows({"messages": messages, "tools": tools}, tokenizer=tokenizer)
    assert text(corpus).startswith('{"name": "f"}<|im_start|>user')
    assert stretches(corpus) == ["Paris<|im_end|>\n", "Bye, dear user!<|im_end|>\n"]


def test_a_tokenizer_without_a_template_or_with_one_that_rewrites_earlier_turns_is_refused(load_rows: Any) -> None:
    said = refusal(lambda: load_rows({"messages": CHAT}, tokenizer=tokenizers.make(None)))
    assert said.startswith("the tokenizer has no chat template\n  because a.jsonl:1 has chats")
    assert said.endswith("hint: its vocabulary has <|im_start|>: --chat-template chatml")
    chat = [USER, {"role": "assistant", "content": "<think>Hm.</think>Paris."}, MORE, BYE]
    said = refusal(lambda: load_rows({"messages": chat}, tokenizer=tokenizers.make(tokenizers.FORGETFUL)))
    assert said.startswith(
        "the chat template does not say which tokens are the assistant's\n  because it has no {% gen"
    )
    assert (
        "  because a.jsonl:1: the first 2 messages alone become ...'<think>Hm.</think>Paris.<|im_end|>\\n', in the "
        "whole chat ...'Paris.<|im_end|>\\n<|im_start|>user\\nBye<|i'\n"
    ) in said
    assert "hint: give a template with {% generation %}" in said and said.endswith("--train-on all")
    assert len(load_rows({"messages": chat[:2]}, tokenizer=tokenizers.make(tokenizers.FORGETFUL)).train) == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": None}, "`messages`: missing, or null"),
        ({"messages": "hello"}, "`messages`: Expected `array`, got `str`"),
        ({"messages": []}, "`messages` has no message"),
        ({"messages": [3]}, "`messages`: Expected `object`, got `int` - at `$[0]`"),
        ({"messages": [{"content": "a"}]}, "message 1: Object missing required field `role`"),
        ({"messages": [{"role": "user"}]}, "message 1 has no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "message 1: Object missing required field `text` - at `$.content[0]`",
        ),
        ({"messages": [ANSWER]}, "its first message is the assistant's: the template cannot be rendered before it"),
        ({"messages": [USER, ANSWER], "tools": "["}, "no JSON in `tools`"),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "message 2 has the weight 0.5: it can be 0 or 1"),
        (  # line ends become one token: that of the template and those that the turn begins with
            {"messages": [USER, ANSWER | {"content": "\n\nParis."}]},
            "the last tokens of its first 1 messages are others once more follows; a template with "
            "{% generation %} says which are the assistant's",
        ),
    ],
)
def test_chats_that_cannot_be_read(row: dict[str, Any], reason: str, load_rows: Any) -> None:
    said = refusal(lambda: load_rows(row))
    assert said.startswith(f"1 row of the data cannot be read\n  because a.jsonl:1: {reason}")
    assert said.endswith("\n\nhint: repair them, or leave them out with --skip-bad-rows")


def test_chats_without_a_turn_of_the_assistant_are_named_or_left_out(load_rows: Any) -> None:
    rows = [{"messages": [USER]}, {"messages": CHAT}, {"messages": [SYSTEM]}]
    said = refusal(lambda: load_rows(*rows))
    assert said.startswith(
        "2 rows of the data have no token to train on\n  because a.jsonl:1: no turn of the assistant\n"
    )
    assert "a.jsonl:3: " in said and "hint: leave them out with --skip-bad-rows, or train on every token" in said
    corpus = load_rows(*rows, skip_bad_rows=True)
    assert len(corpus.train) == 1
    assert corpus.report.left_out("error") == ["2 rows without a token to train on left out"]
    assert len(load_rows(*rows, train_on="all").train) == 3
    odd = [USER, {"role": "Assistant", "content": "Paris."}]
    said = refusal(lambda: load_rows({"messages": odd}))
    assert "no turn of the assistant among Assistant: name its word by --columns assistant=WORD\n" in said


def test_answers_without_text_are_counted(load_rows: Any) -> None:
    asked = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}]}
    rows = [{"messages": [USER, {"role": "assistant", "content": ""}]}, {"messages": CHAT}, asked]
    said = load_rows(*rows).report.in_words()
    assert said.endswith("; an answer of 1 row is empty, and only its end is trained on")
    completions = load_rows({"prompt": "a", "completion": ""}, {"prompt": "a", "completion": "b"})
    assert completions.report.empty_answers == 1
    assert load_rows({"prompt": "a", "response": ""}, {"prompt": "a", "response": "b"}).report.empty_answers == 1


def test_a_chat_that_is_too_long_is_refused_cut_or_left_out(load_rows: Any) -> None:
    rows = [{"messages": CHAT}, {"messages": [USER, ANSWER]}]
    long = len(load_rows(*rows).train[0]["input_ids"])
    said = refusal(lambda: load_rows(*rows, seq_len=long - 1))
    assert f"the longest, a.jsonl:1, has {long} tokens with special ones, --seq-len is {long - 1}\n" in said
    assert said.endswith(f"hint: use --seq-len {long}, or --too-long truncate, or --too-long skip")
    said = refusal(lambda: load_rows(*rows, seq_len=long - 1, max_positions=long - 1))
    assert said.endswith(f"hint: use --too-long truncate, or --too-long skip: the model has {long - 1} positions")
    cut = load_rows(*rows, seq_len=long - 3, too_long="truncate")
    assert cut.train[0]["input_ids"].tolist() == load_rows(*rows).train[0]["input_ids"][: long - 3].tolist()
    assert cut.report.left_out("truncate") == ["1 row longer than --seq-len truncated"]
    assert len(load_rows(*rows, seq_len=long - 1, too_long="skip").train) == 1


def test_packed_chats_keep_their_own_targets(load_rows: Any) -> None:
    rows = [{"messages": [USER, ANSWER]}, {"messages": [MORE, BYE]}]
    apart, packed = load_rows(*rows), load_rows(*rows, pack=True)
    (pack,) = packed.train
    assert pack["documents"].tolist() == apart.train.lengths.tolist()
    assert pack["labels"].tolist() == [label for sample in apart.train for label in sample["labels"].tolist()]


def test_a_built_in_template_whose_marks_are_no_tokens_is_said_to_be_cut_into_pieces() -> None:
    settings = RunSettings(chat_template="chatml", tokenizer="byte")
    spec = ModelSpec(reference="test", task="causal-lm", max_positions=None, vocab_size=None)
    told = corpus_module.tokenizer_for(spec, settings.tokenizer, settings.chat_template)[1]
    assert told.endswith("chatml, of which <|im_start|> and <|im_end|> are no tokens here, but cut into pieces")
    tokenizer = tokenizers.make()
    assert template_module.missing_tokens(tokenizer) == []
    assert len(tokenizer.tokenize("<|im_end|>")) == 1
