"""Columns that may be meant, where one that is needed is not there: by what their values are, in the first rows."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from frugal.data.rows import NEEDED, Row

REQUIRED = frozenset(column for columns in NEEDED.values() for column in columns)
"""Roles of columns without which a row does not have its format."""

_LOOKED_AT = 20  # rows
_NUMBER = re.compile(r"[-+\d.,:/%\sT]*|nan|none|null|true|false|[-+\d.]+e[-+]?\d+", re.IGNORECASE)


def hint(role: str, rows: Iterable[Row], task: str) -> str | None:
    """Return flags that name plausible columns for `role`; None where no column is."""
    values: dict[str, list[Any]] = defaultdict(list)
    for _, row in islice(rows, _LOOKED_AT):
        for name, value in row.items() if isinstance(row, dict) else ():
            values[name].append(value)
    if task == "causal-lm" and (chat := next(filter(None, map(_chat, values, values.values())), None)):
        return f"if they are chats: {chat}"
    # of pairs of preferences (chosen, rejected) one is no answer
    lengths = {name: size for name, given in values.items() if name != "rejected" and (size := mean_characters(given))}
    by_length = sorted(lengths, key=lambda name: -lengths[name])
    if role == "label":  # what has the fewest values, and is not the text
        by_length = sorted(values.keys() - by_length[:1], key=lambda name: (len(set(map(str, values[name]))), name))
    if not by_length:
        return None
    said = f"choose one, such as --columns {role}={by_length[0]}"
    if role == "text" and task == "causal-lm" and len(by_length) > 1:
        first, second = sorted(by_length[:2], key=list(lengths).index)
        said += f"; a question and its answer: --columns prompt={first},response={second}"
    return said


def mean_characters(values: Iterable[Any]) -> float:
    """Return the mean length of texts; 0 where one of them is no text, or all are numbers or dates."""
    texts = [value for value in values if value is not None]
    if not all(isinstance(text, str) for text in texts) or all(_NUMBER.fullmatch(text) for text in texts):
        return 0.0
    return sum(map(len, texts)) / len(texts)


def _chat(name: str, values: Iterable[Any]) -> str | None:
    """Return the flags of a column whose values are lists of messages."""
    messages = [each for value in values if isinstance(value, list) for each in value]
    if not messages or not all(isinstance(each, Mapping) for each in messages):
        return None
    keys = {key: mean_characters([each.get(key) for each in messages]) for each in messages for key in each}
    texts = sorted((key for key in keys if keys[key]), key=lambda key: keys[key])
    return f"--columns messages={name},role={texts[0]},content={texts[-1]}" if len(texts) > 1 else None
