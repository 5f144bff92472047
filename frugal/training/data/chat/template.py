"""Chats as tokens: the tokenizer's own template, and which of its tokens are the assistant's.

Where the template marks what the assistant writes with `{% generation %}`, transformers says which tokens these are.
Otherwise they follow from the template itself: rendered up to a turn of the assistant, with the words that ask for one
(`add_generation_prompt`), and up to the end of that turn, both must be beginnings of the whole chat, first as text and
then as tokens. What lies between is what the model has to write, the end of the turn included. A template that writes
earlier turns in another way once others follow has no such beginnings; where it is of a family that is known, it gets
marks (`marks`), and is refused otherwise, not guessed at.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frugal import files
from frugal.errors import RequestError, first_line
from frugal.training.data.chat import marks
from frugal.training.data.chat.formats import Chat
from frugal.training.data.rows import BadRow

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
"""What Llama 3.1's template says where it is not told the day: the same samples today and tomorrow."""

MOST_BYTES = 1 << 20
"""Of a file with a template; the longest that models come with have some 10 KiB."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


_MARKER = re.compile(r"<\|\w+\|>")


def read_template(reference: str) -> str:
    """The text of the template that `reference` names: a built-in one, or a file.

    Raises:
        RequestError: the file cannot be read, or is no Jinja template.
    """
    if reference in BUILT_IN:
        return BUILT_IN[reference]
    path = Path(reference).expanduser()
    try:
        text = files.read_regular(path, MOST_BYTES).decode()
    except OSError as error:
        because = error.strerror or str(error)
        hint = f"give a file, or {' or '.join(BUILT_IN)}"
        raise RequestError(f"cannot read the chat template {path}", because=because, hint=hint) from None
    except UnicodeDecodeError:
        raise RequestError(f"the chat template {path} is not UTF-8 text") from None
    return text


def missing_tokens(tokenizer: Any) -> list[str]:
    """What the tokenizer's template writes around turns as one token each, and its vocabulary does not have."""
    vocabulary = tokenizer.get_vocab()
    return [token for token in dict.fromkeys(_MARKER.findall(tokenizer.chat_template)) if token not in vocabulary]


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

    def marks_assistant(self, tools: list[dict[str, Any]] | None = None) -> bool:
        """Whether it says itself what the assistant writes."""
        text = self._tokenizer.get_chat_template(tools=tools)
        return bool(_GENERATION.search(text)) and self._tokenizer.is_fast

    @property
    def in_words(self) -> str:
        """How the assistant's tokens are known."""
        text = self._tokenizer.get_chat_template()
        how = "marked by its {% generation %}" if self.marks_assistant() else "found by rendering it turn by turn"
        if not self.marks_assistant() and (known := self._known(None)) is not None:
            how = f"found by marks for templates of {known[0].name}, with which it writes the same"
        words = f"the assistant's tokens are {how}"
        if self.untrained_end:
            words += f", and {self.untrained_end} after them is not: a model does not learn to end its turn by it"
        if "strftime_now" in text and "date_string" not in text:
            words += "; the template writes the day on which the data was first read"
        return words

    def _note_end(self, ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> None:
        """Whether the special token that ends the last turn of a chat, the assistant's, is left out."""
        places = np.flatnonzero(trained)
        if len(places) and places[-1] + 1 < len(ids):
            tokens = self._tokenizer.added_tokens_decoder
            after = tokens.get(int(ids[places[-1] + 1]))
            is_ended = any(token in tokens for token in ids[places[-3:]].tolist())  # a line end may follow it
            if after is not None and after.special and not is_ended:
                self.untrained_end = str(after)

    def render(self, chat: Chat, where: str, *, train_on_all: bool) -> "Rendered | BadRow":
        """What of a chat has to be tokenised.

        Raises:
            RequestError: the template is broken, or the assistant's turns cannot be found in what it writes.
        """
        try:
            return self._render(chat, where, train_on_all)
        except (RequestError, MemoryError):
            raise
        except Exception as error:  # a template raises what it likes
            import jinja2

            if isinstance(error, jinja2.TemplateSyntaxError):
                because = f"line {error.lineno}: {error.message}"
                raise RequestError("the chat template is no Jinja template", because=because) from None
            return BadRow(f"the chat template refuses it: {first_line(error)}")

    def _render(self, chat: Chat, where: str, train_on_all: bool) -> "Rendered | BadRow":
        if train_on_all:
            return Rendered([self._text(chat, len(chat.messages))], None)
        if chat.num_prompt is not None:
            spans = [(chat.num_prompt, len(chat.messages))]
        elif not chat.trained:
            spans = []
        elif self.marks_assistant(chat.tools) and len(chat.trained) == _num_turns(chat):
            return self._marked(chat)
        elif (known := self._known(chat.tools)) is not None and marks.are_complete(known[0], chat.messages):
            return self._by_known_marks(chat, *known)
        else:
            spans = [(turn, turn + 1) for turn in chat.trained]
        if spans and spans[0][0] == 0:
            return BadRow("its first message is the assistant's: the template cannot be rendered before it")
        whole = self._text(chat, len(chat.messages))
        texts = [whole]
        for first, last in spans:
            begin, end = self._text(chat, first, asks=True), self._text(chat, last)
            for number, part in ((first, begin), (last, end)):
                if not whole.startswith(part):
                    raise _not_a_beginning(where, number, part, whole)
            texts += [begin, end]
        return Rendered(texts, spans)

    def _marked(self, chat: Chat) -> "Rendered":
        encoded = self._tokenizer.apply_chat_template(
            chat.messages, tools=chat.tools, return_dict=True, return_assistant_tokens_mask=True,
            **self._options(chat),
        )  # fmt: skip
        ids, trained = np.array(encoded["input_ids"], dtype=np.int32), np.array(encoded["assistant_masks"], dtype=bool)
        if chat.messages[-1]["role"] == "assistant":
            self._note_end(ids, trained)
        return Rendered([], [], (ids, trained))

    def _known(self, tools: list[dict[str, Any]] | None) -> tuple[marks.Family, str] | None:
        """Marks for the template, where it has none and is of a known family."""
        return marks.marked(self._tokenizer.get_chat_template(tools=tools)) if self._tokenizer.is_fast else None

    def _by_known_marks(self, chat: Chat, family: marks.Family, marked: str) -> "Rendered | BadRow":
        """With marks that the template lacks: what it writes must stay, and each turn that is trained on be marked."""
        with_marks = {"tools": chat.tools, "chat_template": marked, **self._options(chat)}
        text = self._tokenizer.apply_chat_template(chat.messages, tokenize=False, **with_marks)
        if text != self._text(chat, len(chat.messages)):
            return BadRow(f"with marks for templates of {family.name}, the chat template writes something else")
        encoded = self._tokenizer.apply_chat_template(
            chat.messages, return_dict=True, return_assistant_tokens_mask=True, **with_marks
        )
        ids, trained = np.array(encoded["input_ids"], dtype=np.int32), np.array(encoded["assistant_masks"], dtype=bool)
        begins = np.flatnonzero(np.diff(trained, prepend=False) & trained)
        num_turns = _num_turns(chat)
        if len(chat.trained) < num_turns:
            if len(begins) != num_turns:
                return BadRow(f"the template writes {len(begins)} marked parts for {num_turns} turns of the assistant")
            turns = [n for n, message in enumerate(chat.messages) if message["role"] == "assistant"]
            for turn, begin, end in zip(turns, begins, [*begins[1:], len(ids)], strict=True):
                trained[begin:end] &= turn in chat.trained
        return Rendered([], [], (ids, trained))

    def _text(self, chat: Chat, number: int, *, asks: bool = False) -> str:
        """The first messages as text; `asks`: with the words that ask the assistant to write."""
        return str(
            self._tokenizer.apply_chat_template(
                chat.messages[:number], tools=chat.tools, tokenize=False, add_generation_prompt=asks,
                **self._options(chat),
            )
        )  # fmt: skip

    def _options(self, chat: Chat) -> dict[str, Any]:
        text = self._tokenizer.get_chat_template(tools=chat.tools)
        return (
            {"date_string": DATE, **chat.options} if "strftime_now" in text and "date_string" in text else chat.options
        )


def _num_turns(chat: Chat) -> int:
    return sum(message["role"] == "assistant" for message in chat.messages)


def _not_a_beginning(where: str, number: int, part: str, whole: str) -> RequestError:
    same = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
    return RequestError(
        "the chat template does not say which tokens are the assistant's",
        because=(
            "it has no {% generation %}, and what it writes of the first turns changes once others follow",
            f"{where}: the first {number} messages alone become ...{part[same : same + 40]!r}, in the whole chat "
            f"...{whole[same : same + 40]!r}",
        ),
        hint="give a template with {% generation %} around the assistant's words: --chat-template FILE; or train on "
        "every token: --train-on all",
    )


class Rendered:
    """A chat as text: all of it, then the beginning and the end of each of `spans`, which alone are trained on.

    `spans` is None where all of it is. `texts` has each of the texts once.
    Where the template marks the assistant's tokens, these are `known`: ids and mask, both of shape `(tokens,)`.
    """

    def __init__(
        self,
        texts: list[str],
        spans: Sequence[tuple[int, int]] | None,
        known: tuple[NDArray[np.int32], NDArray[np.bool_]] | None = None,
    ) -> None:
        self.texts = list(dict.fromkeys(texts))  # the end of the last turn is often all of it
        self._places = [self.texts.index(text) for text in texts]
        self._spans = spans
        self._known = known

    def trained(self, encoded: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.bool_]] | BadRow:
        """The tokens of the chat and which of them are trained on, from those of `texts`."""
        if self._known is not None:
            return self._known
        encoded = [encoded[place] for place in self._places]
        ids = encoded[0]
        trained = np.zeros(len(ids), dtype=bool)
        if self._spans is None:
            return ids, ~trained
        for (first, last), begin, end in zip(self._spans, encoded[1::2], encoded[2::2], strict=True):
            for number, part in ((first, begin), (last, end)):
                if not np.array_equal(ids[: len(part)], part):
                    return BadRow(
                        f"the last tokens of its first {number} messages are others once more follows; a template with "
                        "{% generation %} says which are the assistant's"
                    )
            trained[len(begin) : len(end)] = True
        return ids, trained
