"""A count of what reading the data met, and what is said of rows that are left out or make all of it useless."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

from frugal.config.sample_lengths import TooLong
from frugal.errors import refuse
from frugal.units import plural

NAMED = 10
"""Files and rows that a report names at most."""

REPAIR = "repair them, or leave them out with --skip-bad-rows"
"""The hint of rows that cannot be read."""

_SHOWN = 3  # in a message

_OF_TEXT = tuple(
    f".{kind}{packed}" for kind in ("txt", "text", "md", "rst") for packed in ("", ".gz", ".bz2", ".xz", ".zst")
)


@dataclass(kw_only=True)
class BuildReport:
    """A count of what reading the data met.

    Attributes:
        documents: good rows of which samples were made.
        samples: made from them.
        tokens: in the samples, special ones and the overlap of windows included.
        bad_rows: left out because they cannot be read; `first_bad` has `file:line: reason` of up to ten.
        empty_rows: left out because they have no text.
        too_long_rows: truncated or left out, as asked; `longest` has the tokens of the longest, and where it is.
        too_short_rows: left out because one token has none to learn from it.
        label_names: of classes given as text, in order of their number.
        num_labels: classes; 0 without labels.
        largest_token: id, and where it is; -1 where no token is known.
        formats: of language models, good rows of each format.
        targets: of language models, tokens that are trained on.
        masked_rows: left out because no token of them is trained on; `first_masked` as `first_bad`.
        merged_rows: prompts whose last token reaches into the completion, which begins with that token.
        empty_answers: rows with an answer without text, of which only the end is trained on.
        running: names of files that are running text because nothing else is known of them, up to ten.
        template: how the assistant's tokens were found in chats, in words.
    """

    documents: int = 0
    samples: int = 0
    tokens: int = 0
    bad_rows: int = 0
    first_bad: list[str] = field(default_factory=list)
    empty_rows: int = 0
    too_long_rows: int = 0
    longest: tuple[int, str] = (0, "")
    too_short_rows: int = 0
    label_names: list[str] = field(default_factory=list)
    num_labels: int = 0
    largest_token: tuple[int, str] = (-1, "")
    formats: dict[str, int] = field(default_factory=dict)
    targets: int = 0
    masked_rows: int = 0
    first_masked: list[str] = field(default_factory=list)
    merged_rows: int = 0
    empty_answers: int = 0
    running: list[str] = field(default_factory=list)
    template: str = ""

    def add_bad(self, why: str) -> None:
        """Count a row that cannot be read; `why` has where it is. Up to three of a file are named."""
        self.bad_rows += 1
        name = why.partition(": ")[0].rpartition(":")[0]
        if sum(each.startswith(f"{name}:") for each in self.first_bad) < _SHOWN:
            self.first_bad = [*self.first_bad, why][:NAMED]

    def add_masked(self, why: str) -> None:
        """Count a row without a token to train on; `why` has where it is."""
        self.masked_rows += 1
        self.first_masked = [*self.first_masked, why][:NAMED]

    def left_out(self, too_long: TooLong) -> list[str]:
        """Return what of the data is not trained on, in words."""
        rows = (
            (self.bad_rows, "that cannot be read left out"),
            (self.empty_rows, "without text left out"),
            (self.masked_rows, "without a token to train on left out"),
            (self.too_short_rows, "of one token left out"),
            (self.too_long_rows, "longer than --seq-len " + ("truncated" if too_long == "truncate" else "left out")),
        )
        return [f"{plural(number, 'row')} {what}" for number, what in rows if number]

    def in_words(self) -> str:
        """Return the formats of a language model's rows, how its targets were found, and how many there are."""
        kinds = ", ".join(f"{plural(number, 'row')} of {kind}" for kind, number in self.formats.items())
        # Files became running text where their names do not say it or others did not.
        running = [name for name in self.running if len(self.formats) > 1 or not name.endswith(_OF_TEXT)]
        if running and "text" in self.formats:
            others = " and others" if len(running) > _SHOWN else ""
            kinds += f" (read as running text: {', '.join(running[:_SHOWN])}{others})"
        share = 100 * self.targets / self.tokens
        words = f"{kinds} ({self.template})" if self.template else kinds
        words += f"; {self.targets:,} of {self.tokens:,} tokens are trained on ({share:.1f} %)"
        if self.merged_rows:
            words += (
                f"; in {plural(self.merged_rows, 'row')} the prompt's last token reaches into the completion and is "
                "trained on; prompts that end without a space avoid it"
            )
        if self.empty_answers:
            words += f"; an answer of {plural(self.empty_answers, 'row')} is empty, and only its end is trained on"
        return words

    def refuse_rows(self, skip_bad_rows: bool, too_long: TooLong, seq_len: int, most: int | None) -> None:
        """Refuse rows that are not to be left out, or of more than `seq_len` tokens and not to be cut. The model reads
        at `most` so many; None: any number.

        Raises:
            RequestError: there are some.
        """
        more = self.bad_rows - len(self.first_bad)
        tokens, where = self.longest
        refuse(
            (
                self.bad_rows and not skip_bad_rows,
                f"{plural(self.bad_rows, 'row')} of the data cannot be read",
                [*self.first_bad, *([f"of {more:,} more"] if more else [])],
                REPAIR,
            ),
            (
                self.masked_rows and not skip_bad_rows,
                f"{plural(self.masked_rows, 'row')} of the data {'has' if self.masked_rows == 1 else 'have'} no token "
                "to train on",
                self.first_masked[:_SHOWN],
                "leave them out with --skip-bad-rows, or train on every token with --train-on all",
            ),
            (
                self.too_long_rows and too_long == "error",
                f"{plural(self.too_long_rows, 'sample')} {'is' if self.too_long_rows == 1 else 'are'} longer than "
                "--seq-len",
                f"the longest, {where}, has {tokens} tokens with special ones, --seq-len is {seq_len}",
                f"use --seq-len {tokens}, or --too-long truncate, or --too-long skip"
                if most is None or tokens <= most
                else f"use --too-long truncate, or --too-long skip: the model has {most} positions",
            ),
        )


_JOINED: dict[type, Callable[[list[Any]], Any]] = {
    int: sum,
    tuple: max,
    str: lambda texts: next(filter(None, texts), ""),
    list: lambda lists: list(chain.from_iterable(lists))[:NAMED],
    dict: lambda counts: dict(sum(map(Counter, counts), Counter())),
}
"""How values of several reports are joined, by their type."""


def joined(reports: Sequence[BuildReport]) -> BuildReport:
    """Return the report of reading several sources."""
    values = {each.name: [getattr(report, each.name) for report in reports] for each in fields(BuildReport)}
    total = BuildReport(**{name: _JOINED[type(of_all[0])](of_all) for name, of_all in values.items()})
    return replace(total, label_names=reports[-1].label_names, num_labels=max(values["num_labels"]))
