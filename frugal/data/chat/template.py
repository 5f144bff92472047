"""Chats as tokens: the tokenizer's own template, and which of its tokens are the assistant's.

Where the template marks what the assistant writes with `{% generation %}`, transformers says which tokens these are.
Otherwise they follow from the template itself: rendered up to a turn of the assistant, with the words that ask for one
(`add_generation_prompt`), and up to the end of that turn, both must be beginnings of the whole chat, first as text and
then as tokens. What lies between is what the model has to write, the end of the turn included. A template that writes
earlier turns in another way once others follow has no such beginnings; where it is of a family that is known, it gets
marks (`marked`), and is refused otherwise, not guessed at.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frugal import files
from frugal.data import tokenizer as tokenizing
from frugal.data.chat.formats import Chat, Trained
from frugal.data.rows import BadRow
from frugal.errors import RequestError, failure, first_line

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""https://github.com/openai/openai-python/blob/v0.28.1/chatml.md, with the assistant's words marked."""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""https://huggingface.co/docs/transformers/chat_templating, as of Llama 3, with the assistant's words marked."""

BUILT_IN = {"chatml": CHATML, "llama3": LLAMA3}
_FIRST_TOKEN = {"chatml": "<|im_start|>", "llama3": "<|start_header_id|>"}

DATE = "26 Jul 2024"
"""The date that Llama 3.1's template writes where none is given: the same samples today and tomorrow."""

MOST_BYTES = 1 << 20
"""The longest file with a template that is read; the longest that models come with have some 10 KiB."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


_MARKER = re.compile(r"<\|\w+\|>")


def read_template(reference: str) -> str:
    """Return the text of the template that `reference` names: a built-in one, or a file.

    Raises:
        RequestError: the file cannot be read, or is no Jinja template.
    """
    if reference in BUILT_IN:
        return BUILT_IN[reference]
    with failure(f"cannot read the chat template {reference}", hint=f"give a file, or {' or '.join(BUILT_IN)}"):
        return files.read_regular(Path(reference).expanduser(), MOST_BYTES).decode()


def missing_tokens(tokenizer: Any) -> list[str]:
    """Return the marks around turns in the tokenizer's template that its vocabulary does not have as tokens."""
    vocabulary = tokenizer.get_vocab()
    return [token for token in dict.fromkeys(_MARKER.findall(tokenizer.chat_template)) if token not in vocabulary]


# Marks for templates of known families, which come without. Turn by turn, the assistant's words cannot be found where a
# template writes earlier turns in another way once others follow. Such families are known by the lines of their
# templates that write a turn of the assistant, in all versions that have these lines. The marks are put into the
# tokenizer's own template, so that what it writes stays, which is compared for each chat. They enclose what follows the
# words that ask for a turn, up to the end of the turn. Qwen 2.5, Llama 3, Gemma, Phi-4 and ChatML need none.

_BEGIN, _END = "{%- generation %}", "{%- endgeneration %}"
_LINE_END = r"(?:\\n|\n)"


@dataclass(frozen=True)
class Family:
    """Templates of one kind, and where their marks go.

    Attributes:
        name: of the models.
        edits: patterns that must occur, each with what it is replaced by.
        marks_calls: whether calls of tools are marked, too.
    """

    name: str
    edits: tuple[tuple[str, str], ...]
    marks_calls: bool = False


_QWEN_THOUGHTS = r"(?P<begin>\{%- if [^%]*loop\.index0 > ns\.last_query_index[^%]*%\})"
_DEEPSEEK_TURN, _DEEPSEEK_END = "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
_FAMILIES = (
    Family(
        "Qwen 3",
        (
            (_QWEN_THOUGHTS, r"{{- '<|im_start|>' + message.role + '\\n' }}" + _BEGIN + r"\g<begin>"),
            (r"'<\|im_start\|>' \+ message\.role \+ '\\n<think>\\n' \+", r"'<think>\\n' +"),
            (r"\{\{- '<\|im_start\|>' \+ message\.role \+ '\\n' \+ content \}\}", "{{- content }}"),
            (r"(?P<end>\{\{- '<\|im_end\|>\\n' \}\})(?=\s*\{%- elif message\.role == \"tool\" %\})", r"\g<end>" + _END),
        ),
        marks_calls=True,
    ),
    Family(
        "Phi-3",
        (
            (
                rf"\{{\{{ ?'<\|assistant\|>(?P<line>{_LINE_END})' \+ message\['content'\] \+ "
                rf"'<\|end\|>(?P<last>{_LINE_END})' ?\}}\}}",
                r"{{ '<|assistant|>\g<line>' }}{% generation %}{{ message['content'] + '<|end|>\g<last>' }}"
                r"{% endgeneration %}",
            ),
            (
                r"\{% else %\}\{\{ eos_token \}\}\{% endif %\}",
                r"{% elif messages[-1]['role'] == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}"
                r"{% else %}{{ eos_token }}{% endif %}",
            ),
        ),
    ),
    Family(
        "DeepSeek",
        (
            (
                rf"\{{\{{'{_DEEPSEEK_TURN}' \+ content \+ '{_DEEPSEEK_END}'\}}\}}",
                f"{{{{'{_DEEPSEEK_TURN}'}}}}{{% generation %}}{{{{content + '{_DEEPSEEK_END}'}}}}{{% endgeneration %}}",
            ),
        ),
    ),
    Family(
        "gpt-oss",
        (
            (
                r"\{\{- \"<\|start\|>assistant(?P<rest><\|channel\|>(?:final|analysis)<\|message\|>\" \+ [^}]*)\}\}",
                r'{{- "<|start|>assistant" }}' + _BEGIN + r'{{- "\g<rest>}}' + _END,
            ),
        ),
    ),
    Family(
        "Mistral",
        (
            (
                r"(?P<role>\{%- elif message\[\"role\"\] == \"assistant\" %\}\s*)"
                r"(?P<turn>\{\{- (?:\" \" \+ )?message\[\"content\"\](?: ?\| ?trim)? \+ eos_token ?\}\})",
                r"\g<role>" + _BEGIN + r"\g<turn>" + _END,
            ),
        ),
    ),
)  # fmt: skip


@cache
def marked(template: str) -> tuple[Family, str] | None:
    """Return the family of a template, and the template with marks; None where it has some, or is of no family."""
    for family in _FAMILIES:
        text = template
        for pattern, replacement in family.edits:
            text, number = re.subn(pattern, replacement, text)
            if not number:
                break
        else:
            return family, text
    return None


class ChatTemplate:
    """The template of a tokenizer. `untrained_end`: a token that ends turns and is left out by its `{% generation %}`.

    Raises:
        RequestError: it has none; `needed_by` says what asks for it.
    """

    def __init__(self, tokenizer: Any, needed_by: str) -> None:
        self._tokenizer = tokenizer
        self.untrained_end = ""
        if getattr(tokenizer, "chat_template", None) is None:
            vocabulary = tokenizer.get_vocab()
            known = next((name for name, token in _FIRST_TOKEN.items() if token in vocabulary), None)
            raise RequestError(
                "the tokenizer has no chat template",
                because=f"{needed_by} has chats, and a template says how they are written",
                hint=f"its vocabulary has {_FIRST_TOKEN[known]}: --chat-template {known}"
                if known
                else "give the one that the model was trained with: --chat-template FILE, or for a base model "
                "--chat-template chatml",
            )

    @property
    def in_words(self) -> str:
        """Return how the assistant's tokens are found."""
        text = self._tokenizer.get_chat_template()
        how = "found by rendering it turn by turn"
        if self._has_marks(None):
            how = "marked by its {% generation %}"
        elif (known := self._known(None)) is not None:
            how = f"found by marks for templates of {known[0].name}, with which it writes the same"
        words = f"the assistant's tokens are {how}"
        if self.untrained_end:
            words += f", and {self.untrained_end} after them is not: a model does not learn to end its turn by it"
        if "strftime_now" in text and "date_string" not in text:
            words += "; the template writes the day on which the data was first read"
        return words

    def _has_marks(self, tools: list[dict[str, Any]] | None) -> bool:
        return bool(_GENERATION.search(self._tokenizer.get_chat_template(tools=tools))) and self._tokenizer.is_fast

    def _known(self, tools: list[dict[str, Any]] | None) -> tuple[Family, str] | None:
        return marked(self._tokenizer.get_chat_template(tools=tools)) if self._tokenizer.is_fast else None

    def encode(self, chat: Chat, where: str, *, train_on_all: bool) -> Trained | BadRow:
        """Return the tokens of a chat, and which of them are trained on.

        Raises:
            RequestError: the assistant's turns cannot be found in what the template writes, or it is no template.
        """
        import jinja2  # transformers needs it for templates alone

        try:
            return self._encoded(chat, where, train_on_all)
        except RequestError:
            raise
        except jinja2.TemplateSyntaxError as error:
            because = f"line {error.lineno}: {error.message}"
            raise RequestError("the chat template is no Jinja template", because=because) from None
        except Exception as error:  # a template raises what it likes
            alone = " (a message has tool calls alone)" * any("content" not in each for each in chat.messages)
            return BadRow(f"the chat template refuses it: {first_line(error)}{alone}")

    def _encoded(self, chat: Chat, where: str, train_on_all: bool) -> Trained | BadRow:
        turns = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
        spans = [(turn, turn + 1) for turn in chat.trained]
        if train_on_all:
            spans = []
        elif chat.num_prompt is not None:
            spans = [(chat.num_prompt, len(chat.messages))]
        elif not chat.trained:
            pass
        elif len(chat.trained) == len(turns) and self._has_marks(chat.tools):
            ids, trained = self._with_mask(chat)
            if turns[-1] == len(chat.messages) - 1:
                self._note_end(ids, trained)
            return ids, trained
        elif (known := self._known(chat.tools)) is not None and (
            known[0].marks_calls or not any(message.get("tool_calls") for message in chat.messages)
        ):
            return self._by_known_marks(chat, turns, *known)
        if spans and spans[0][0] == 0:
            return BadRow("its first message is the assistant's: the template cannot be rendered before it")
        texts = [self._text(chat, len(chat.messages))]
        for first, last in spans:
            texts += [self._text(chat, first, add_generation_prompt=True), self._text(chat, last)]
        numbers = [number for span in spans for number in span]
        for number, part in zip(numbers, texts[1:], strict=True):
            if not texts[0].startswith(part):
                pairs = zip(part, texts[0], strict=False)
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(part), len(texts[0])))
                raise RequestError(
                    "the chat template does not say which tokens are the assistant's",
                    because=(
                        "it has no {% generation %}, and what it writes of the first turns changes once others follow",
                        f"{where}: the first {number} messages alone become ...{part[same : same + 40]!r}, in the "
                        f"whole chat ...{texts[0][same : same + 40]!r}",
                    ),
                    hint="give a template with {% generation %} around the assistant's words: --chat-template FILE; or "
                    "train on every token: --train-on all",
                )
        # One after another: a tokenizer takes 165 times the bytes of its text.
        tokens_of = {text: tokenizing.encode(self._tokenizer, [text])[0] for text in dict.fromkeys(texts)}
        ids, *parts = [tokens_of[text] for text in texts]
        for number, part_ids in zip(numbers, parts, strict=True):
            if not np.array_equal(ids[: len(part_ids)], part_ids):
                return BadRow(
                    f"the last tokens of its first {number} messages are others once more follows; a template with "
                    "{% generation %} says which are the assistant's"
                )
        trained = np.full(len(ids), train_on_all)
        for begin, end in zip(parts[::2], parts[1::2], strict=True):
            trained[len(begin) : len(end)] = True
        return ids, trained

    def _with_mask(self, chat: Chat, **template: str) -> Trained:
        encoded = self._tokenizer.apply_chat_template(
            chat.messages, tools=chat.tools, return_dict=True, return_assistant_tokens_mask=True,
            **template, **self._options(chat),
        )  # fmt: skip
        return np.array(encoded["input_ids"], dtype=np.int32), np.array(encoded["assistant_masks"], dtype=bool)

    def _note_end(self, ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> None:
        """Record the special token that ends the assistant's last turn if it is not trained on."""
        places = np.flatnonzero(trained)
        if len(places) and places[-1] + 1 < len(ids):
            tokens = self._tokenizer.added_tokens_decoder
            after = tokens.get(int(ids[places[-1] + 1]))
            is_ended = any(token in tokens for token in ids[places[-3:]].tolist())  # a line end may follow it
            if after is not None and after.special and not is_ended:
                self.untrained_end = str(after)

    def _by_known_marks(self, chat: Chat, turns: Sequence[int], family: Family, marked: str) -> Trained | BadRow:
        """Use marks that the template lacks: what it writes must stay, and each turn that is trained on be marked."""
        whole = len(chat.messages)
        if self._text(chat, whole, chat_template=marked) != self._text(chat, whole):
            return BadRow(f"with marks for templates of {family.name}, the chat template writes something else")
        ids, trained = self._with_mask(chat, chat_template=marked)
        begins = np.flatnonzero(np.diff(trained, prepend=False) & trained)
        if len(chat.trained) < len(turns):
            if len(begins) != len(turns):
                return BadRow(f"the template writes {len(begins)} marked parts for {len(turns)} turns of the assistant")
            for turn, begin, end in zip(turns, begins, [*begins[1:], len(ids)], strict=True):
                trained[begin:end] &= turn in chat.trained
        return ids, trained

    def _text(self, chat: Chat, number: int, **more: Any) -> str:
        messages, options = chat.messages[:number], self._options(chat)
        return str(self._tokenizer.apply_chat_template(messages, tools=chat.tools, tokenize=False, **more, **options))

    def _options(self, chat: Chat) -> dict[str, Any]:
        text = self._tokenizer.get_chat_template(tools=chat.tools)
        takes_date = "strftime_now" in text and "date_string" in text
        return {"date_string": DATE, **chat.options} if takes_date else chat.options
