"""The kept recordings: a stream of requests, where it comes from, and what is known of the script that made it."""

import lzma
from pathlib import Path

import msgspec

from bench.gpu.streams import SUFFIX, Stream

FOLDER = Path(__file__).parent / "streams"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a public repository that a recording was read from."""

    repository: str
    path: str
    commit: str


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """A recording of a real card.

    Attributes:
        source: where it comes from.
        script: what is known of what ran: model, sizes, order of steps; and what is not known.
        stream: the requests, those that make the start of the recording first (`bench.recordings.snapshot`).
        num_before: how many of them make the start.
        is_clean: whether the allocator had no segment at the start.
        made_bytes: the segments that were made while it was recorded.
        allocated_at_end_bytes: in blocks at the end, as torch counts them.
        printed_peak_gib: `max_memory_allocated` during the recording as the script printed it, to two digits.
    """

    source: Source
    script: str
    stream: Stream
    num_before: int
    is_clean: bool
    made_bytes: int
    allocated_at_end_bytes: int
    printed_peak_gib: float | None = None

    @property
    def path(self) -> Path:
        """Its file."""
        return FOLDER / f"{self.stream.name}{SUFFIX}"

    def write(self) -> Path:
        """Write the file and return its path."""
        FOLDER.mkdir(exist_ok=True)
        self.path.write_bytes(lzma.compress(msgspec.json.encode(self), preset=9 | lzma.PRESET_EXTREME))
        return self.path

    @classmethod
    def read(cls, path: Path) -> "Recording":
        """Return the recording in a file."""
        return msgspec.json.decode(lzma.decompress(path.read_bytes()), type=cls)

    @property
    def reserved_error(self) -> float:
        """The error of the replay's peak of segments, relative to the recorded one."""
        return self.stream.replays().under().peak_reserved_bytes / self.stream.reserved_bytes - 1

    @property
    def allocated_error(self) -> float:
        """The error of the bytes in blocks at the end, relative to torch's count."""
        return self._allocated()[-1] / self.allocated_at_end_bytes - 1

    @property
    def peak_allocated_bytes(self) -> int:
        """The most in blocks since the start, as replayed."""
        return max(self._allocated())

    def _allocated(self) -> list[int]:
        """Return the bytes in blocks after each event since the start."""
        blocks = self.stream.replays().block_bytes()
        alive: set[int] = set()
        allocated, requested, after = 0, 0, []
        for number in self.stream.lifetimes:
            allocated += -blocks[number] if number in alive else blocks[number]
            requested += number == requested
            alive ^= {number}
            if requested > self.num_before:
                after.append(allocated)
        return after


def kept() -> list[Recording]:
    """Return all recordings, in the order of their names."""
    return [Recording.read(path) for path in sorted(FOLDER.glob(f"*{SUFFIX}"))]
