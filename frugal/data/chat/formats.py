"""Rows by their columns: a chat, a prompt with its completion, an instruction, tokens, or running text.

Rows of the first four become a `Chat`, a `Prompted` or a `TokenIds`: one sample each, never cut into windows.

| format | columns |
|---|---|
| `messages` | OpenAI's: `role`, `content`, also `tool_calls` and `weight`; beside them `tools` |
| `conversations` | ShareGPT's: `from`, `value`; beside them `system`, `tools` |
| `prompt-completion` | two texts, or two lists of messages, as in TRL |
| `prompt-response` | a question and its answer, which become a chat; beside them `system` |
| `instruction` | Alpaca's: `instruction`, `input` if there is any, `output`, in Alpaca's words |
| `tokens` | `input_ids`, and `labels` (-100: not trained on), `attention_mask` (0: padding) if there are any |
| `text` | running text |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from frugal.config.run_settings import RENAMED_COLUMNS, Format
from frugal.data.rows import NEEDED, BadRow, Columns
from frugal.errors import RequestError
from frugal.units import IGNORED


@dataclass(frozen=True)
class Chat:
    """Messages for a template. `trained` are the numbers of the assistant's turns that are trained on.

    `num_prompt`: of a prompt and its completion, how many messages are the prompt; all after them is trained on.
    """

    messages: list[dict[str, Any]]
    trained: tuple[int, ...]
    num_prompt: int | None = None
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Return the number of characters."""
        return sum(len(message.get("content", "")) for message in self.messages)


@dataclass(frozen=True)
class Prompted:
    """A text that is read, and the one that is to be written after it."""

    prompt: str
    completion: str

    @property
    def size(self) -> int:
        """Return the number of characters."""
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True)
class TokenIds:
    """Tokens as they come, and which of them are trained on; both of shape `(tokens,)`."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]

    @property
    def size(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)


Whole = Chat | Prompted | TokenIds
"""A row that is one sample."""

Trained = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Tokens, and which of them are trained on, both of shape `(tokens,)`."""


_READ: dict[Format, tuple[str, ...]] = {
    "messages": ("messages", "system", "tools"),
    "conversations": ("conversations", "system", "tools"),
    "prompt-completion": ("prompt", "completion", "tools"),
    "prompt-response": ("prompt", "response", "system", "tools"),
    "instruction": ("instruction", "input", "output"),
    "tokens": ("input_ids", "labels"),
    "text": (),
}
"""Columns of each format that may be named."""


def recognised(columns: Sequence[str], named: Columns, source: str, asked: Format | None) -> Format | None:
    """Return the format of a source's rows; None where they have no column that is known.

    Raises:
        RequestError: they fit several, or not the one asked for, or a column was named that the format does not have.
    """
    here = named.standard(dict.fromkeys(columns))
    its_columns = ", ".join(str(column) for column in columns if column is not None) or "none"
    fitting: list[Format]
    if asked is not None:
        missing = [column for column in NEEDED.get(asked, ()) if column not in here]
        if missing:
            raise RequestError(
                f"{source} has no column `{named.renamed.get(missing[0], missing[0])}`",
                because=[f"--format {asked} reads {' and '.join(NEEDED[asked])}", f"its columns are {its_columns}"],
                hint=f"if another one has it: --columns {missing[0]}=NAME",
            )
        fitting = [asked]
    elif named.text != "text" and named.text in columns:  # it was asked for
        fitting = ["text"]
    else:
        fitting = [name for name, needed in NEEDED.items() if set(needed) <= here.keys()]
        meant = [name for name in fitting if named.renamed.keys() & NEEDED[name]]
        if meant:
            fitting = meant
        elif named.text in columns:
            fitting.append("text")
        if len(fitting) > 1:  # many rows with these two have text for other formats
            fitting = [name for name in fitting if name != "prompt-response"]
    if len(fitting) > 1:
        raise RequestError(
            f"the rows of {source} fit several formats: {', '.join(fitting)}",
            because=f"their columns are {its_columns}",
            hint=f"say which one to train on, such as --format {fitting[0]}",
        )
    read_here = _READ[fitting[0]] if fitting else RENAMED_COLUMNS
    for role, name in named.renamed.items():
        if name in columns and role in RENAMED_COLUMNS and role not in read_here:
            raise RequestError(
                f"--columns {role}={name} says nothing of the rows of {source}",
                because=f"read as {fitting[0]}, they have {', '.join(read_here) or 'one column'}",
                hint="of a question and its answer name prompt= and response=, and system= if there is one",
            )
    return fitting[0] if fitting else None


def read(row: Mapping[str, Any], kind: Format) -> Whole | BadRow:
    """Return what a row of this format has, or why it cannot be read."""
    assert kind in get_args(Format) and kind != "text"
    try:
        if kind == "tokens":
            return _token_ids(row)
        if kind == "instruction":
            return _instruction(row)
        if kind == "prompt-completion" and not isinstance(row.get("prompt"), list):
            return Prompted(_text(row, "prompt"), _text(row, "completion"))
        return _chat(row, kind)
    except _WrongError as error:
        return BadRow(str(error))


class _WrongError(Exception):
    """A row does not fit its format, and why."""


def _as(kind: Any, value: Any, where: str) -> Any:
    """Return a value as this type, checked by msgspec."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _WrongError(f"{where}: {'missing, or null' if value is None else error}") from None


def _text(row: Mapping[str, Any], column: str) -> str:
    return _checked(_as(str, row.get(column), f"`{column}`"), f"`{column}`")


def _checked(text: str, where: str) -> str:
    if not is_utf_8(text):
        raise _WrongError(f"{where} is not UTF-8 text")
    return text


def is_utf_8(text: str) -> bool:
    """Return whether a text has no half of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)


def _instruction(row: Mapping[str, Any]) -> Prompted:
    """Return the prompt in the words of https://github.com/tatsu-lab/stanford_alpaca, README, "Data Release"."""
    instruction, output = _text(row, "instruction"), _text(row, "output")
    more = _text(row, "input") if row.get("input") is not None else ""
    return Prompted(_WITH_INPUT.format(instruction, more) if more else _WITHOUT_INPUT.format(instruction), output)


def _chat(row: Mapping[str, Any], kind: Format) -> Chat:
    options = _as(dict[str, Any], row.get("chat_template_kwargs") or {}, "`chat_template_kwargs`")
    beside = partial(Chat, tools=_tools(row), options=options)
    if kind == "prompt-completion":
        prompt, completion = _messages(row, "prompt"), _messages(row, "completion")
        return beside(prompt + completion, (), len(prompt))
    if kind == "prompt-response":
        said = {"system": _text(row, "system")} if row.get("system") else {}
        said |= {"user": _text(row, "prompt"), "assistant": _text(row, "response")}
        return beside([{"role": role, "content": text} for role, text in said.items()], (len(said) - 1,))
    messages = _messages(row, kind)
    if kind == "conversations" and row.get("system") and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _text(row, "system")}, *messages]
    trained = []
    for number, message in enumerate(messages):
        weight = message.pop("weight", None)
        if weight not in (None, 0, 1):
            raise _WrongError(f"message {number + 1} has the weight {weight}: it can be 0 or 1")
        if message["role"] == "assistant" and weight != 0:
            trained.append(number)
    return beside(messages, tuple(trained))


_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "bot": "assistant", "model": "assistant", "function_response": "tool", "observation": "tool",
}  # fmt: skip
"""ShareGPT's names, in those that templates know."""

_TEMPLATES_KNOW = ("system", "developer", *_ROLES.values())


class _Part(msgspec.Struct):
    """A part of a message that has text; others, such as images, cannot be trained on."""

    text: str


class _Message(msgspec.Struct):
    """A message as templates know it; it may have more fields."""

    role: str
    content: str | list[str | _Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Function(msgspec.Struct):
    """A function that a message calls."""

    name: str


def _messages(row: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    messages = _as(list[dict[str, Any]], row.get(column), f"`{column}`")
    if not messages:
        raise _WrongError(f"`{column}` has no message")
    return [_message(message, f"message {number}") for number, message in enumerate(messages, 1)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message with `role` and, where it has one, a `content` of text; the rest goes to the template."""
    kept = {name: value for name, value in message.items() if value is not None}
    if "role" not in kept and isinstance(name := kept.get("from"), str):
        kept["role"] = _ROLES.get(name, name)
        kept.pop("from")
        if "value" in kept:
            kept["content"] = kept.pop("value")
    checked = _as(_Message, kept, where)
    if checked.content is not None:
        parts = [checked.content] if isinstance(checked.content, str) else checked.content
        kept["content"] = _checked("".join([part if isinstance(part, str) else part.text for part in parts]), where)
    elif checked.tool_calls is None:
        raise _WrongError(f"{where} has no content")
    if checked.tool_calls is not None:
        kept["tool_calls"] = [_tool_call(call, where) for call in checked.tool_calls]
    return kept


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a call whose arguments are an object, as templates expect; OpenAI writes that object as text."""
    function = call.get("function", call)
    _as(_Function, function, f"a tool call of {where}")
    if isinstance(function.get("arguments"), str):
        function = function | {"arguments": _json(function["arguments"], f"the arguments in {where}")}
    return call | {"function": function} if "function" in call else function


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    tools = _json(tools, "`tools`") if isinstance(tools, str) and tools else tools
    return _as(list[dict[str, Any]], tools, "`tools`") if tools else None


def _json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        raise _WrongError(f"no JSON in {what}") from None


def _token_ids(row: Mapping[str, Any]) -> TokenIds:
    ids = _integers(row, "input_ids")
    if len(ids) and (ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
        raise _WrongError(f"`input_ids` has {ids.min() if ids.min() < 0 else ids.max()}, which is no token")
    trained = np.ones(len(ids), dtype=bool)
    if row.get("labels") is not None:
        labels = _integers(row, "labels", len(ids))
        trained = labels != IGNORED
        other = np.flatnonzero(trained & (labels != ids))
        if len(other):
            place = int(other[0])
            raise _WrongError(
                f"the label at position {place} is {labels[place]}: neither -100 nor the token, {ids[place]}"
            )
    else:
        for name in ("completion_mask", "assistant_masks"):
            if row.get(name) is not None:
                trained &= _integers(row, name, len(ids)) != 0
    if row.get("attention_mask") is not None:
        real = np.flatnonzero(_integers(row, "attention_mask", len(ids)))
        if len(real) and int(real[-1]) - int(real[0]) + 1 != len(real):
            raise _WrongError("`attention_mask` hides tokens between others: only padding can be left out")
        ids, trained = ids[real], trained[real]
    if not len(ids):
        raise _WrongError("`input_ids` has no token")
    return TokenIds(ids.astype(np.int32), trained)


def _integers(row: Mapping[str, Any], column: str, length: int | None = None) -> NDArray[np.int64]:
    if column not in row:
        raise _WrongError(f"no `{column}`")
    value = row[column]
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray([0.5])
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub") or not isinstance(value, list | np.ndarray):
        raise _WrongError(f"`{column}` is not a list of whole numbers")
    if length is not None and len(array) != length:
        raise _WrongError(f"`{column}` has {len(array)} numbers, `input_ids` has {length}")
    return array.astype(np.int64)


def answers_nothing(row: Whole) -> bool:
    """Return whether an answer to train on has no text and no call of a tool: only its end is learnt."""
    if not isinstance(row, Chat):
        return isinstance(row, Prompted) and not row.completion
    answers = row.messages[row.num_prompt :] if row.num_prompt else [row.messages[number] for number in row.trained]
    return any(not each.get("content") and not each.get("tool_calls") for each in answers)


def why_masked(row: Whole) -> str:
    """Return why a row has no token to train on."""
    match row:
        case TokenIds():
            return "every label is -100" if len(row.ids) > 1 else "it is one token"
        case Prompted():
            return "its completion has no token"
    other = ", ".join(dict.fromkeys(role for each in row.messages if (role := each["role"]) not in _TEMPLATES_KNOW))
    none = "no turn of the assistant" + (f" among {other}: name its word by --columns assistant=WORD" if other else "")
    return "no token of it is marked as the assistant's" if row.trained else none
