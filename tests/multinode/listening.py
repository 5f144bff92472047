"""Programs that look at a host: `python listening.py commands FILE` and `python listening.py wire PORT FILE`.

The first writes down every command line that there is on the host, until it is ended. The second writes down what the
first rank that connects to the port says there, as everyone can who sees the packets.
"""

import contextlib
import signal
import socket
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


def wire(port: int, out: Path) -> None:
    """An introduction begins with what it is for."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800)) as packets:
        while True:
            packet = packets.recv(65536)
            if packet[9] != socket.IPPROTO_TCP:
                continue
            header = (packet[0] & 15) * 4
            to = int.from_bytes(packet[header + 2 : header + 4], "big")
            payload = packet[header + (packet[header + 12] >> 4) * 4 : int.from_bytes(packet[2:4], "big")]
            if to == port and payload.startswith(b"store\0"):
                out.write_bytes(payload)
                return


if __name__ == "__main__":
    if sys.argv[1] == "commands":
        commands(Path(sys.argv[2]))
    else:
        wire(int(sys.argv[2]), Path(sys.argv[3]))
