"""Write down every command line that there is on this host, until it is ended: `python listening.py FILE`."""

import contextlib
import signal
import sys
import time
from pathlib import Path


def commands(out: Path) -> None:
    seen: set[bytes] = set()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        while True:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.add(path.read_bytes())
            time.sleep(0.03)
    finally:
        out.write_bytes(b"\n".join(sorted(seen)))


if __name__ == "__main__":
    commands(Path(sys.argv[1]))
