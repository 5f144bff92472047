"""Rank 0's listening socket: it lets in ranks that prove themselves (`handshake`), whatever else connects to it.

All connections are served by one thread, which never waits for one of them. Who has not proven itself within
`HANDSHAKE_SECONDS` is dropped, however slowly its bytes come; of more than `MOST_PENDING` the oldest goes, of the
address that has the most, so that who floods drops its own. Once all ranks are in, nothing listens any more.
"""

import atexit
import os
import resource
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import psutil  # type: ignore[import-untyped]  # has no types

from frugal.distributed import env
from frugal.distributed.connections import handshake
from frugal.distributed.connections.handshake import Introduction

HANDSHAKE_SECONDS = 10.0
MOST_PENDING = 256
_ACCEPTED_AT_ONCE, _PAUSE_SECONDS = 128, 0.01  # a flood leaves the rank's other threads most of their time
_LOOK_SECONDS = 0.2  # between looks at who is late

Admit = Callable[[socket.socket, Introduction], None]
"""Takes over a proven connection, on the gate's thread."""


def address_of_rank_0() -> str:
    """Where ranks reach rank 0."""
    return env.LOOPBACK if env.is_on_one_host() else os.environ["MASTER_ADDR"]


def listen(port: int, world_size: int) -> socket.socket:
    """A server socket of rank 0, on the address where ranks reach it and on no other.

    Where that is not an address of this host (behind a translation of addresses), or its name means the loopback here
    as on Debian, it is on all of them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (wanted := 8 * world_size + 1024) and hard > soft:  # also of gloo, NCCL, the store
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard > 0 else wanted, hard))
    named = address_of_rank_0()
    family, _, _, _, resolved = socket.getaddrinfo(named, port, type=socket.SOCK_STREAM)[0]
    address = str(resolved[0])
    own = {each.address.split("%")[0] for addresses in psutil.net_if_addrs().values() for each in addresses}
    is_loopback = address.startswith("127.") or address == "::1"
    if not env.is_on_one_host() and (address not in own or is_loopback):
        address = ""
    return socket.create_server((address, port), family=family, backlog=1024)


@dataclass
class _Pending:
    """A connection that has not proven itself: who it is from, until when it may, what it was sent and has sent."""

    address: str
    end: float
    challenge: bytes
    received: bytearray = field(default_factory=bytearray)


class Gate:
    """Lets ranks in through `server`, from `open` until `expected` are in, or `close`.

    `admit` says who takes over the connections of each purpose. They may register them in `selector`, with what is to
    be called with the socket once it can be read.
    """

    def __init__(
        self, server: socket.socket, secret: bytes, world_size: int, admit: Mapping[str, Admit], expected: int
    ) -> None:
        self.selector = selectors.DefaultSelector()
        self._server, self._secret, self._world_size, self._admit = server, secret, world_size, admit
        self._expected, self._is_closing, self._is_over = expected, False, False
        self._pending: dict[socket.socket, _Pending] = {}  # the oldest first
        self.on_look: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Begin."""
        self._server.setblocking(False)
        self.selector.register(self._server, selectors.EVENT_READ, self._accept)
        thread = threading.Thread(target=self._run, name="gate", daemon=True)
        thread.start()
        atexit.register(self._end, thread)  # a thread that wakes up while the interpreter is taken down ends it badly

    def close(self) -> None:
        """Let nobody in any more."""
        self._is_closing = True

    def _end(self, thread: threading.Thread) -> None:
        self._is_over = True
        thread.join(10 * _LOOK_SECONDS)

    def _run(self) -> None:
        while self.selector.get_map() and not self._is_over:
            for key, _ in self.selector.select(_LOOK_SECONDS):
                key.data(key.fileobj)
            self.on_look()
            now = time.monotonic()
            for sock in [sock for sock, pending in self._pending.items() if pending.end < now]:
                self._drop(sock)
            if self._is_closing and self._server.fileno() >= 0:
                for sock in list(self._pending):
                    self._drop(sock)
                self.selector.unregister(self._server)
                self._server.close()

    def _accept(self, server: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = server.accept()
            except BlockingIOError:
                return
            except OSError:  # it has gone again, or there are no descriptors left
                break
            if len(self._pending) >= MOST_PENDING:
                self._drop_oldest()
            pending = _Pending(str(address[0]), time.monotonic() + HANDSHAKE_SECONDS, handshake.new_challenge())
            sock.setblocking(False)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.send(handshake.frame(pending.challenge))
            except OSError:
                sock.close()
                continue
            self._pending[sock] = pending
            self.selector.register(sock, selectors.EVENT_READ, self._read)
        time.sleep(_PAUSE_SECONDS)

    def _drop_oldest(self) -> None:
        """Of the address that has most."""
        ((most, _),) = Counter(pending.address for pending in self._pending.values()).most_common(1)
        self._drop(next(sock for sock, pending in self._pending.items() if pending.address == most))

    def _drop(self, sock: socket.socket) -> None:
        del self._pending[sock]
        self.selector.unregister(sock)
        sock.close()

    def _read(self, sock: socket.socket) -> None:
        """Take in what came on a pending connection; it is dropped for anything but a proven introduction."""
        if sock not in self._pending:  # dropped for another that was ready at the same time
            return
        pending = self._pending[sock]
        try:
            part = sock.recv(handshake.MOST_BYTES)
            pending.received += part
            message = handshake.first_frame(pending.received, handshake.MOST_BYTES)
            if message is None and part:
                return
            said = msgspec.msgpack.decode(message or b"", type=Introduction)
        except BlockingIOError:
            return
        except (OSError, ValueError, msgspec.DecodeError):
            self._drop(sock)
            return
        is_proven = said.is_proven(self._secret, pending.challenge)
        if not (is_proven and said.purpose in self._admit and 0 <= said.rank < self._world_size):
            with suppress(OSError):
                sock.send(handshake.REFUSAL)
            self._drop(sock)
            return
        self._let_in(sock, said, pending)

    def _let_in(self, sock: socket.socket, said: Introduction, pending: _Pending) -> None:
        del self._pending[sock]
        self.selector.unregister(sock)
        try:
            sock.send(handshake.frame(said.proof_of("rank 0", self._secret, pending.challenge)))
        except OSError:
            sock.close()
            return
        self._admit[said.purpose](sock, said)
        self._expected -= 1
        if not self._expected:
            self._is_closing = True
