"""What a stranger on the network does to a run, until told to end: `python stranger.py PORT RECORDING HOST...`.

It connects before the run does, holds connections open, floods, dribbles, sends garbage, pickles, forged values for
the store and the introduction that `RECORDING` has of a rank, once there is one. It prints how often each was tried
and how many connections were made, and whatever it was sent back that is neither a challenge nor a refusal.
"""

import contextlib
import json
import os
import pickle
import random
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

HELD = 300
told = threading.Event()
CHALLENGE_BYTES = 32
REFUSAL = bytes(32)


class Payload:
    """Leaves a file where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch unpickled",)


def framed(message: bytes) -> bytes:
    return struct.pack("!I", len(message)) + message


def forged(key: bytes, value: bytes) -> bytes:
    """A request to the run's store, and one to a TCPStore of torch's."""
    ours = b"\x95\xa3set\x91" + bytes([0xA0 + len(key)]) + key + b"\x91\xc4" + bytes([len(value)]) + value + b"\x00\x00"
    theirs = b"\x00" + struct.pack("=I", 0x3C85F7CE) + b"\x01" + struct.pack("=Q", len(key)) + key
    return framed(ours) + theirs + struct.pack("=Q", len(value)) + value


def messages(recording: Path) -> dict[str, bytes]:
    """What is sent, by name."""
    said = {
        "nested": framed(b"\x96\xa1w\x01\xa1h\xc4\x00\xc4\x00" + b"\x91" * 1005 + b"\x90"),
        "garbage": random.randbytes(900),
        "pickle": framed(pickle.dumps(Payload())),
        "huge": struct.pack("!I", 2**32 - 1) + bytes(1000),
        "verdict": forged(b"frugal/verdict", b'["ended", [], ""]'),
        "failed": forged(b"frugal/failed", b"1"),
        "gloo": struct.pack("=q", random.randrange(8)) + random.randbytes(100),
        "http": b"GET / HTTP/1.1\r\n\r\n",
    }
    if recording.exists() and (recorded := recording.read_bytes()):
        said["replay"] = recorded
    return said


class Stranger:
    """Attacks one address."""

    def __init__(self, address: tuple[str, int], recording: Path) -> None:
        self.address, self.recording = address, recording
        self.tried: dict[str, int] = {}
        self.connected = 0
        self.answers: set[str] = set()

    def connect(self, what: str) -> socket.socket | None:
        self.tried[what] = self.tried.get(what, 0) + 1
        with contextlib.suppress(OSError):
            sock = socket.create_connection(self.address, timeout=2)
            self.connected += 1
            return sock
        time.sleep(0.02)
        return None

    def hold(self) -> None:
        """Half-open connections, which dribble."""
        held: list[socket.socket] = []
        while not told.is_set():
            if (sock := self.connect("hold")) is not None:
                held.append(sock)
            for each in held[-20:]:
                with contextlib.suppress(OSError):
                    each.send(b"\0")
            if len(held) > HELD:
                held.pop(0).close()
            time.sleep(0.005)

    def say(self) -> None:
        while not told.is_set():
            for name, message in messages(self.recording).items():
                if (sock := self.connect(name)) is None:
                    continue
                answer = b""
                with sock, contextlib.suppress(OSError):
                    sock.sendall(message)
                    sock.shutdown(socket.SHUT_WR)
                    while part := sock.recv(1000):
                        answer += part
                if answer[CHALLENGE_BYTES:] not in (b"", REFUSAL):
                    self.answers.add(f"{name}: {answer!r}")

    def flood(self) -> None:
        while not told.is_set():
            if (sock := self.connect("flood")) is not None:
                sock.close()


def main() -> None:
    port, recording, *hosts = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    strangers = [Stranger((host, int(port)), Path(recording)) for host in hosts]
    actions = [action for stranger in strangers for action in (stranger.hold, stranger.say, stranger.flood)]
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # so that the signal's handler runs
            thread.join(0.2)
    done = [{"tried": each.tried, "connected": each.connected, "answers": sorted(each.answers)} for each in strangers]
    print(json.dumps(done))


if __name__ == "__main__":
    main()
