"""From sources to samples on disk.

A document is one row of jsonl, csv, parquet or a saved dataset, or one text file (long ones: stretches of whole
lines of about 64 KiB). Documents become samples of at most `seq_len` tokens, stored as Arrow under a name that is a
hash of the data, the tokenizer and every option: memory-mapped when opened, made once, shared by all ranks.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from frugal.errors import RequestError
from frugal.training import packs, tokenizing
from frugal.training.arrow import PackingWriter, Samples, Writer
from frugal.training.cutting import Cutter, TooLong
from frugal.training.provenance import Provenance
from frugal.training.sources import Bad, Columns, Row, Source, find

_FORMAT = 2  # of the files in the cache; another number is another cache
_FLUSH_CHARACTERS = 1 << 20  # tokenised and written together


@dataclass(frozen=True, kw_only=True)
class Report:
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

    def left_out(self, too_long: TooLong) -> list[str]:
        """What of the data is not trained on, in words."""
        rows = (
            (self.bad_rows, "that cannot be read left out"),
            (self.empty_rows, "without text left out"),
            (self.too_short_rows, "of one token left out"),
            (self.too_long_rows, "longer than --seq-len " + ("truncated" if too_long == "truncate" else "left out")),
        )
        return [f"{number} row{'s' * (number != 1)} {what}" for number, what in rows if number]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Samples to train on, samples kept back, what reading them met, and where they come from."""

    train: Samples
    validation: Samples | None
    report: Report
    provenance: Provenance

    @property
    def fingerprint(self) -> str:
        """A hash of all that made the samples."""
        return self.provenance.fingerprint


def load(
    sources: Sequence[str],
    *,
    tokenizer: Any,
    task: str,
    seq_len: int,
    pack: bool = False,
    columns: Columns | None = None,
    limit: int | None = None,
    skip_bad_rows: bool = False,
    too_long: TooLong = "error",
    label_names: Sequence[str] = (),
    validation_fraction: float = 0.0,
    cache_dir: Path | None = None,
) -> Corpus:
    """The samples in `sources`: files, globs, folders, datasets saved to disk, hub names, or `stdlib`.

    Language models: a document longer than `seq_len` tokens becomes several samples, each token being a target
    once; with `pack`, shorter ones share a sample. Pairs and classes cannot be cut: `too_long` says what to do. `limit`
    is in documents. A `validation_fraction` of the documents, evenly spread and at least one, is kept back.

    Classes given as text are numbered as they come. For validation data of its own, pass `label_names` of the
    training data's report, so that both have the same numbers.

    Several processes may call at once; each may do the work, and the first to finish is kept.

    Raises:
        RequestError: nothing there, a column missing, nothing left, or (unless asked otherwise) a row that cannot be
            read or is too long.
    """
    if not 0 <= validation_fraction < 1:
        raise RequestError(
            f"a validation fraction of {validation_fraction} is not possible",
            because="it must be at least 0 and less than 1",
        )
    if limit is not None and limit < 1:
        raise RequestError(f"a limit of {limit} documents leaves no data", hint="ask for at least 1 document")
    columns = columns or Columns()
    found = find(sources)
    options = {
        "format": _FORMAT, "task": task, "seq_len": seq_len, "columns": asdict(columns), "limit": limit,
        "too_long": too_long, "labels": list(label_names), "validation": str(_fraction(validation_fraction)),
        "tokenizer": tokenizing.fingerprint(tokenizer), "sources": [source.fingerprint for source in found],
    }  # fmt: skip
    if pack:
        options["pack"] = packs.MOST_OPEN
    key = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
    cache = cache_dir or platformdirs.user_cache_path("frugal") / "data"
    folder = cache / key[:32]
    if not folder.exists():
        cutter = Cutter(tokenizer, task, seq_len, columns, too_long, label_names)
        try:
            _prepare(found, cutter, folder, pack, limit, skip_bad_rows, _fraction(validation_fraction))
        except OSError as error:
            raise RequestError(
                f"the tokenised data cannot be written to {cache}",
                because=error.strerror or str(error),
                hint="free some space, or set XDG_CACHE_HOME to a folder on another disk",
            ) from None
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    if report.bad_rows and not skip_bad_rows:
        raise _bad_rows_error(report)
    validation = folder / "validation.arrow"
    return Corpus(
        train=Samples(folder / "train.arrow", key),
        validation=Samples(validation, key) if validation.exists() else None,
        report=report,
        provenance=Provenance.of(
            found, key, options, documents=report.documents, samples=report.samples, tokens=report.tokens
        ),
    )


def _prepare(
    sources: Sequence[Source],
    cutter: Cutter,
    folder: Path,
    pack: bool,
    limit: int | None,
    skip_bad_rows: bool,
    validation: Fraction,
) -> None:
    """Write `folder` with `train.arrow`, `validation.arrow` (if asked) and `report.json`: whole, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        report = _write(sources, cutter, aside, pack, limit, skip_bad_rows, validation)
        (aside / "report.json").write_bytes(msgspec.json.encode(report))
        try:
            aside.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was first, with the same content
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(
    sources: Sequence[Source],
    cutter: Cutter,
    aside: Path,
    pack: bool,
    limit: int | None,
    skip_bad_rows: bool,
    validation: Fraction,
) -> Report:
    num_documents = num_empty = num_bad = 0
    first_bad: list[str] = []
    with ExitStack() as stack:

        def out(name: str) -> Writer:
            path = aside / name
            return stack.enter_context(
                PackingWriter(path, cutter.task, cutter.seq_len) if pack else Writer(path, cutter.task)
            )

        train = out("train.arrow")
        kept_back = out("validation.arrow") if validation else None

        def flush() -> None:
            nonlocal num_documents, num_empty
            for samples in cutter.samples(documents) if documents else ():
                if samples:
                    is_kept_back = kept_back is not None and _is_kept_back(num_documents, validation)
                    (kept_back if kept_back is not None and is_kept_back else train).write(samples)
                    num_documents += 1
            documents.clear()

        documents: list[tuple[str, tuple[Any, ...]]] = []
        num_characters = num_good = 0
        for where, row in _rows(sources, cutter):
            fields = row if isinstance(row, Bad) else cutter.fields(row)
            if isinstance(fields, Bad):
                num_bad += 1
                if len(first_bad) < 10:
                    first_bad.append(f"{where}: {fields.reason}")
                continue
            if "" in fields:
                num_empty += 1
                continue
            if num_bad and not skip_bad_rows:
                continue  # an error is certain; only the count of bad rows is still of interest
            documents.append((where, fields))
            num_good += 1
            num_characters += sum(len(value) for value in fields if isinstance(value, str))
            if num_characters > _FLUSH_CHARACTERS:
                flush()
                num_characters = 0
            if num_good == limit:
                break
        flush()
    label_names = tuple(cutter.label_names)
    if cutter.task == "sequence-classification":
        label_names = label_names or next((source.label_names for source in sources if source.label_names), ())
    report = Report(
        documents=num_documents,
        samples=train.num_samples + (kept_back.num_samples if kept_back else 0),
        tokens=train.num_tokens + (kept_back.num_tokens if kept_back else 0),
        bad_rows=num_bad,
        first_bad=tuple(first_bad),
        empty_rows=num_empty,
        too_long_rows=cutter.num_too_long,
        too_short_rows=num_good - num_documents - cutter.num_too_long * (cutter.too_long != "truncate"),
        label_names=label_names,
        num_labels=max(cutter.num_labels, len(label_names)),
    )
    if num_bad and not skip_bad_rows:
        raise _bad_rows_error(report)
    if cutter.num_too_long and cutter.too_long == "error":
        tokens, where = cutter.longest
        raise RequestError(
            f"{cutter.num_too_long} of {num_documents + cutter.num_too_long} samples are longer than --seq-len",
            because=f"the longest, {where}, has {tokens} tokens with special ones, --seq-len is {cutter.seq_len}",
            hint=f"use --seq-len {tokens}, or --too-long truncate, or --too-long skip",
        )
    if report.samples == 0:
        left_out = [f"{num_bad} rows that cannot be read"] * (num_bad > 0) + [f"{num_empty} rows without text"] * (
            num_empty > 0
        )
        raise RequestError(
            "there is no text in the data",
            because=f"{_names(sources)} {'has' if len(sources) == 1 else 'have'} {' and '.join(left_out) or 'no rows'}",
        )
    if train.num_samples == 0:
        raise RequestError(
            "the data cannot be divided into training and validation",
            because=f"it is {num_documents} document{'s' * (num_documents != 1)}",
            hint="set the validation fraction to 0, or give validation data of its own",
        )
    return report


def _rows(sources: Sequence[Source], cutter: Cutter) -> Iterator[Row]:
    """The rows of all sources; each source's columns are checked before its first good row."""
    for source in sources:
        checked = source.columns is not None
        if source.columns is not None:
            cutter.check(source, source.columns)
        for where, row in source.rows(cutter.columns):
            if not checked and isinstance(row, dict):
                cutter.check(source, list(row))
                checked = True
            yield where, row


def _bad_rows_error(report: Report) -> RequestError:
    rows = "1 row" if report.bad_rows == 1 else f"{report.bad_rows} rows"
    return RequestError(
        f"{rows} of the data cannot be read",
        because=f"{'the first is ' if report.bad_rows > 1 else ''}{report.first_bad[0]}",
        hint="repair them, or leave them out with --skip-bad-rows",
    )


def _names(sources: Sequence[Source]) -> str:
    return sources[0].name if len(sources) == 1 else f"{sources[0].name} and {len(sources) - 1} more"


def _fraction(value: float) -> Fraction:
    return Fraction(value).limit_denominator(1_000_000)


def _is_kept_back(document: int, fraction: Fraction) -> bool:
    """Whether document number `document` is for validation: the first, then evenly spread, ceil(n * fraction) of n."""
    return -(-(document + 1) * fraction // 1) > -(-document * fraction // 1)
