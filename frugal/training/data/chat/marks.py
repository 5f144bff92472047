"""`{% generation %}` around the assistant's words in templates of known families, which come without.

Turn by turn, the assistant's words cannot be found where a template writes earlier turns in another way once others
follow. Such families are known here by the lines of their templates that write a turn of the assistant, in all versions
that have these lines. The marks are put into the tokenizer's own template, so that what it writes stays; of each chat
that is compared. They enclose what follows the words that ask for a turn, up to the end of the turn.

Qwen 2.5, Llama 3, Gemma, Phi-4, ChatML and others need none: rendered turn by turn, they say the same.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

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
    """The family of a template, and the template with marks; None where it has some, or is of no family."""
    for family in _FAMILIES:
        text = template
        for pattern, replacement in family.edits:
            text, number = re.subn(pattern, replacement, text)
            if not number:
                break
        else:
            return family, text
    return None


def are_complete(family: Family, messages: list[dict[str, Any]]) -> bool:
    """Whether all that the assistant writes in these messages is marked."""
    return family.marks_calls or not any(_calls(message) for message in messages)


def _calls(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls"))
