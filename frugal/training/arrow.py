"""Samples as an Arrow file: appended in batches, memory-mapped when they are read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frugal.training.loss import Sample


class Samples(Sequence[Sample]):
    """Tokenised samples on disk, read on access.

    A sample has `input_ids`, for pairs also `labels` (arrays of shape `(tokens,)`), for classes `label`.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        import datasets

        table = datasets.Dataset.from_file(str(path))
        self.fingerprint = fingerprint
        self.lengths: NDArray[np.int32] = table.data.column("length").to_numpy()
        self._rows = table.remove_columns("length").with_format("numpy")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._rows[int(index)]


class Writer:
    """Appends samples to an Arrow stream that `datasets` opens."""

    def __init__(self, path: Path, task: str) -> None:
        import pyarrow as pa  # type: ignore[import-untyped]  # it has no type hints

        tokens = pa.list_(pa.int32())
        own = {"seq2seq": {"labels": tokens}, "sequence-classification": {"label": pa.int64()}}.get(task, {})
        self._schema = pa.schema({"input_ids": tokens, **own, "length": pa.int32()})
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        self._pending: list[dict[str, Any]] = []
        self.num_samples = 0
        self.num_tokens = 0

    def write(self, samples: Sequence[dict[str, Any]]) -> None:
        self._pending += samples
        self.num_samples += len(samples)
        self.num_tokens += sum(len(sample["input_ids"]) for sample in samples)
        if len(self._pending) >= 1000:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        columns = [
            pa.array([sample[column.name] for sample in self._pending], type=column.type) for column in self._schema
        ]
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))
        self._pending.clear()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._pending:
            self._flush()
        self._stream.close()
        self._file.close()
