"""`python -m bench.recordings.keep SNAPSHOT`: read somebody's snapshot of a real card, and keep its facts.

The snapshot is a file of `torch.cuda.memory._dump_snapshot`. Kept are sizes and order of requests, compressed, with
where it comes from; no stacks, no addresses, no code. What is not stated anywhere is written as "not stated".
"""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu.streams import Stream
from bench.recordings.recording import Recording, Source
from bench.recordings.snapshot import Snapshot, SnapshotError, read


def recording_of(snapshot: Snapshot, asked: argparse.Namespace) -> Recording:
    """Return what is kept of a snapshot."""
    requests = snapshot.requests
    stream = Stream(
        name=asked.name, device=asked.card, is_emulated=False, versions={"torch": asked.torch},
        date=datetime.now(UTC).date().isoformat(), command=f"python -m bench.recordings.keep {asked.path}",
        expandable_segments=snapshot.expandable_segments, addresses_fall=snapshot.addresses_fall,
        sizes=requests.sizes, cuda_streams=requests.cuda_streams, events=requests.events,
        empty_caches=requests.empty_caches, phases=[("recording", 0)],
        allocated_bytes={"recording": 0}, reserved_bytes=snapshot.reserved_bytes,
    )  # fmt: skip
    return Recording(
        source=Source(repository=asked.repository, path=asked.path, commit=asked.commit), script=asked.script,
        stream=stream, num_before=snapshot.num_before, is_clean=snapshot.is_clean,
        made_bytes=snapshot.made_bytes,
        allocated_at_end_bytes=snapshot.allocated_at_end_bytes, printed_peak_gib=asked.printed_peak,
    )  # fmt: skip


def main() -> int:
    """Read, keep, and print how near the replay comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--name", required=True, help="of the kept file")
    parser.add_argument("--repository", required=True, help="owner/name")
    parser.add_argument("--path", required=True, help="of the file in the repository")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--card", default="not stated")
    parser.add_argument("--torch", default="not stated", help="its version")
    parser.add_argument("--script", required=True, help="what ran, in words: sizes and order of steps")
    parser.add_argument(
        "--printed-peak", type=float, metavar="GIB", help="max_memory_allocated that the script printed"
    )
    asked = parser.parse_args()
    try:
        made = recording_of(read(asked.snapshot), asked)
    except (SnapshotError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{made.write()}: reserved {made.reserved_error:+.4%}, allocated at the end {made.allocated_error:+.4%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
