"""Samples of rows that are one sample each: their tokens, and which of them are trained on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frugal.training.data import tokenizer as tokenizing
from frugal.training.data.chat import rendering
from frugal.training.data.chat.formats import Chat, Prompted, TokenIds, Whole
from frugal.training.data.chat.template import ChatTemplate, Rendered
from frugal.training.data.rows import BadRow

Trained = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Tokens, and which of them are trained on, both of shape `(tokens,)`."""


@dataclass
class WholeRows:
    """Makes tokens of whole rows. `num_merged` counts prompts whose last token reaches into the completion."""

    tokenizer: Any
    train_on_all: bool
    num_merged: int = 0
    template: ChatTemplate | None = None

    def check(self, where: str) -> None:
        """Whether chats can be written.

        Raises:
            RequestError: the tokenizer has no template.
        """
        self.template = self.template or ChatTemplate(self.tokenizer, where)

    def encode(self, rows: Sequence[tuple[str, Whole]]) -> Iterator[Trained | BadRow]:
        """Of each row, given with where it is. All are tokenised in one call.

        Raises:
            RequestError: as `ChatTemplate`.
        """
        parts = self._parts(rows)
        texts = [text for part in parts for text in _texts_of(part)]
        encoded = iter(tokenizing.encode(self.tokenizer, texts))
        for (_, row), part in zip(rows, parts, strict=True):
            if isinstance(part, BadRow):
                yield part
            elif isinstance(part, Rendered):
                yield part.trained([next(encoded) for _ in part.texts])
            elif isinstance(row, TokenIds):
                yield row.ids, row.trained | self.train_on_all
            else:
                yield self._prompted([next(encoded) for _ in part])

    def _parts(self, rows: Sequence[tuple[str, Whole]]) -> list[Rendered | BadRow | list[str]]:
        """Return what is to be tokenised of each row: a chat as `Rendered`, of others their texts."""
        chats = [(where, row) for where, row in rows if isinstance(row, Chat)]
        rendered: Iterator[Rendered | BadRow] = iter(())
        if chats:
            self.check(chats[0][0])
            assert self.template is not None
            process = rendering.process_for(self.template, self.tokenizer)
            rendered = iter(list(process.render(chats, train_on_all=self.train_on_all)))
        return [
            next(rendered)
            if isinstance(row, Chat)
            else [row.prompt, row.prompt + row.completion]
            if isinstance(row, Prompted)
            else []
            for _, row in rows
        ]

    def _prompted(self, encoded: Sequence[NDArray[np.int32]]) -> Trained:
        """The whole text's tokens between the tokenizer's first and the end token. The completion begins where they are
        no longer those of the prompt alone."""
        prompt, whole = (self._begun(ids) for ids in encoded)
        end = self.tokenizer.eos_token_id
        if end is not None and (not len(whole) or whole[-1] != end):
            whole = np.append(whole, np.int32(end))
        both = min(len(prompt), len(whole))
        same = prompt[:both] == whole[:both]
        first = both if same.all() else int(np.argmin(same))
        self.num_merged += first < len(prompt)
        return whole, (np.arange(len(whole)) >= first) | self.train_on_all

    def _begun(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        if len(self._beginning) and (not len(ids) or ids[0] != self._beginning[0]):
            return np.concatenate([self._beginning, ids])
        return ids

    @cached_property
    def _beginning(self) -> NDArray[np.int32]:
        """The token that the tokenizer itself puts before a text, if there is one."""
        around, begin = self.tokenizer("")["input_ids"], self.tokenizer.bos_token_id
        return np.array([begin] if begin is not None and around[:1] == [begin] else [], dtype=np.int32)


def _texts_of(part: Rendered | BadRow | list[str]) -> list[str]:
    return part.texts if isinstance(part, Rendered) else [] if isinstance(part, BadRow) else part
