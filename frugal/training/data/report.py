"""What reading the data met, and what is said of rows that are left out or make all of it useless."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from frugal.config.sample_lengths import TooLong
from frugal.errors import RequestError
from frugal.units import plural


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What reading the data met.

    Attributes:
        documents: good rows.
        samples: made from them.
        tokens: in the samples, special ones and the overlap of windows included.
        bad_rows: left out because they cannot be read; `first_bad` has `file:line: reason` of up to ten.
        empty_rows: left out because they have no text.
        too_long_rows: truncated or left out, as asked.
        too_short_rows: left out because one token has none to learn from it.
        label_names: of classes given as text, in order of their number.
        num_labels: classes; 0 without labels.
        largest_token: id, and where it is; -1 where no token is known.
        formats: of language models, good rows of each format.
        targets: of language models, tokens that are trained on.
        masked_rows: left out because no token of them is trained on; `first_masked` as `first_bad`.
        merged_rows: prompts whose last token reaches into the completion, which begins with that token.
        template: how the assistant's tokens were found in chats, in words.
    """

    documents: int = 0
    samples: int = 0
    tokens: int = 0
    bad_rows: int = 0
    first_bad: tuple[str, ...] = ()
    empty_rows: int = 0
    too_long_rows: int = 0
    too_short_rows: int = 0
    label_names: tuple[str, ...] = ()
    num_labels: int = 0
    largest_token: tuple[int, str] = (-1, "")
    formats: dict[str, int] = field(default_factory=dict)
    targets: int = 0
    masked_rows: int = 0
    first_masked: tuple[str, ...] = ()
    merged_rows: int = 0
    template: str = ""

    def left_out(self, too_long: TooLong) -> list[str]:
        """What of the data is not trained on, in words."""
        rows = (
            (self.bad_rows, "that cannot be read left out"),
            (self.empty_rows, "without text left out"),
            (self.masked_rows, "without a token to train on left out"),
            (self.too_short_rows, "of one token left out"),
            (self.too_long_rows, "longer than --seq-len " + ("truncated" if too_long == "truncate" else "left out")),
        )
        return [f"{plural(number, 'row')} {what}" for number, what in rows if number]

    def in_words(self) -> str:
        """Of language models' rows: what they are, how the assistant's tokens were found, and what is trained on."""
        kinds = ", ".join(f"{plural(number, 'row')} of {kind}" for kind, number in self.formats.items())
        parts = [f"{kinds} ({self.template})" if self.template else kinds]
        share = 100 * self.targets / self.tokens
        parts.append(f"{self.targets:,} of {self.tokens:,} tokens are trained on ({share:.1f} %)")
        if self.merged_rows:
            parts.append(
                f"in {plural(self.merged_rows, 'row')} the prompt's last token reaches into the completion and is "
                "trained on; prompts that end without a space avoid it"
            )
        return "; ".join(parts)

    def refuse_bad_rows(self) -> None:
        """Where they are not to be left out.

        Raises:
            RequestError: there are some.
        """
        if self.bad_rows:
            raise _bad_rows_error(self)
        if self.masked_rows:
            raise _masked_rows_error(self)


def joined(reports: Sequence[BuildReport]) -> BuildReport:
    """What reading several sources met."""
    total = {
        field.name: sum(getattr(report, field.name) for report in reports)
        for field in fields(BuildReport)
        if field.type == "int" or field.type is int
    }
    formats = sum((Counter(report.formats) for report in reports), Counter())
    return replace(
        reports[-1], **total | {"num_labels": max(report.num_labels for report in reports)},
        first_bad=tuple(reason for report in reports for reason in report.first_bad)[:_NAMED],
        first_masked=tuple(reason for report in reports for reason in report.first_masked)[:_NAMED],
        largest_token=max((report.largest_token for report in reports), key=lambda pair: pair[0]),
        formats=dict(formats), template=next((report.template for report in reports if report.template), ""),
    )  # fmt: skip


@dataclass
class Refused:
    """Rows that are no samples: how many, and `file:line: reason` of the first."""

    number: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, why: str) -> None:
        """One more."""
        self.number += 1
        if len(self.first) < _NAMED:
            self.first.append(why)


_NAMED = 10
SHOWN = 3  # in a message


def _bad_rows_error(report: BuildReport) -> RequestError:
    """What is said of rows that cannot be read, where they are not to be left out."""
    rows = "1 row" if report.bad_rows == 1 else f"{report.bad_rows} rows"
    return RequestError(
        f"{rows} of the data cannot be read",
        because=f"{'the first is ' if report.bad_rows > 1 else ''}{report.first_bad[0]}",
        hint="repair them, or leave them out with --skip-bad-rows",
    )


def _masked_rows_error(report: BuildReport) -> RequestError:
    """The same of rows in which nothing is trained on."""
    return RequestError(
        f"{plural(report.masked_rows, 'row')} of the data {'has' if report.masked_rows == 1 else 'have'} no token to "
        "train on",
        because=list(report.first_masked[:SHOWN]),
        hint="leave them out with --skip-bad-rows, or train on every token with --train-on all",
    )
