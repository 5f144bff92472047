"""From sources to samples on disk, made once.

A document is one row of jsonl, csv, parquet or a saved dataset, or one text file (long ones: stretches of whole
lines of about 64 KiB). Documents become samples of at most `seq_len` tokens, stored as Arrow under a name that is a
hash of the data, the tokenizer and every option: memory-mapped when opened, made once, shared by all ranks.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from frugal.errors import RequestError
from frugal.training import packs, tokenizing
from frugal.training.arrow import Samples
from frugal.training.cutting import Cutter, TooLong
from frugal.training.preparation import Report, bad_rows_error, prepare
from frugal.training.provenance import Provenance
from frugal.training.sources import Columns, find

_FORMAT = 2  # of the files in the cache; another number is another cache


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
            prepare(
                found, cutter, folder, pack=pack, limit=limit, skip_bad_rows=skip_bad_rows,
                validation=_fraction(validation_fraction),
            )  # fmt: skip
        except OSError as error:
            raise RequestError(
                f"the tokenised data cannot be written to {cache}",
                because=error.strerror or str(error),
                hint="free some space, or set XDG_CACHE_HOME to a folder on another disk",
            ) from None
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    if report.bad_rows and not skip_bad_rows:
        raise bad_rows_error(report)
    validation = folder / "validation.arrow"
    return Corpus(
        train=Samples(folder / "train.arrow", key),
        validation=Samples(validation, key) if validation.exists() else None,
        report=report,
        provenance=Provenance.of(
            found, key, options, documents=report.documents, samples=report.samples, tokens=report.tokens
        ),
    )


def _fraction(value: float) -> Fraction:
    return Fraction(value).limit_denominator(1_000_000)
