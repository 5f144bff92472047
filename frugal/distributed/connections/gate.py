"""Rank 0's listening socket: it lets in ranks that prove themselves (`handshake`), whatever else connects to it.

All connections are served by one thread, which never waits for one of them. Who has not proven itself within
`HANDSHAKE_SECONDS` is dropped, however slowly its bytes come. Of more than `MOST_PENDING` the oldest goes: of an
address that has more than there are ranks, so that who floods drops its own, otherwise of all. The fastest flood takes
`MOST_PENDING` / `_ACCEPTED_AT_ONCE` * `_PAUSE_SECONDS` = 0.16 s to push out a rank that does not answer, which then
tries again. Once all ranks are in, nothing listens any more.
"""

import atexit
import math
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

import psutil  # type: ignore[import-untyped]  # has no types

from frugal.distributed import env
from frugal.distributed.connections import handshake
from frugal.distributed.connections.handshake import Introduction

HANDSHAKE_SECONDS = 10.0
MOST_PENDING = 1024
_ACCEPTED_AT_ONCE, _PAUSE_SECONDS = 64, 0.01  # a flood leaves the rank's other threads most of their time
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
    if soft < (wanted := 8 * world_size + 2 * MOST_PENDING) and hard > soft:  # also of gloo, NCCL, the store
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
    """A connection that is not let in yet: where it is from, until when it may wait, what it was sent and has sent.

    `said`: what it has proven, once it has; it is let in when it confirms that it was welcomed.
    """

    address: str
    end: float
    challenge: bytes
    received: bytearray = field(default_factory=bytearray)
    said: Introduction | None = None


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
        thread = threading.Thread(target=self._run, name="frugal gate", daemon=True)
        thread.start()
        atexit.register(self._end, thread)  # a thread that wakes up while the interpreter is taken down ends it badly

    def close(self) -> None:
        """Let nobody in any more."""
        self._is_closing = True

    def _end(self, thread: threading.Thread) -> None:
        self._is_over = True
        thread.join(10 * _LOOK_SECONDS)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:  # it ends the run, and nobody is to wait for an answer meanwhile
            for key in self.selector.get_map().values():
                key.fileobj.close()  # type: ignore[union-attr]  # only sockets are registered
            raise

    def _serve(self) -> None:
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
                self._make_room()
            pending = _Pending(str(address[0]), time.monotonic() + HANDSHAKE_SECONDS, handshake.new_challenge())
            sock.setblocking(False)
            try:
                handshake.keep_alive(sock)
                sock.send(pending.challenge)
            except OSError:
                sock.close()
                continue
            self._pending[sock] = pending
            self.selector.register(sock, selectors.EVENT_READ, self._read)
        time.sleep(_PAUSE_SECONDS)

    def _make_room(self) -> None:
        """Drop the oldest that has proven nothing, of an address that has more than there are ranks if there is one."""
        unproven = {sock: pending.address for sock, pending in self._pending.items() if pending.said is None}
        ((most, number),) = Counter(unproven.values()).most_common(1) or [("", 0)]
        for sock, address in unproven.items():
            if address == most or number <= self._world_size:
                self._drop(sock)
                return

    def _drop(self, sock: socket.socket) -> None:
        del self._pending[sock]
        self.selector.unregister(sock)
        sock.close()

    def _read(self, sock: socket.socket) -> None:
        """Take in what came on a pending connection; it is dropped for anything but a proven introduction."""
        pending = self._pending.get(sock)
        if pending is None:  # dropped for another that was ready at the same time
            return
        missing = handshake.INTRODUCTION_BYTES - len(pending.received) or len(handshake.CONFIRMATION)
        try:
            part = sock.recv(missing)  # not beyond it, which is for whom it is let in to
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._drop(sock)
        elif pending.said is not None:
            self._let_in(sock, pending.said)
        else:
            pending.received += part
            if len(part) == missing:
                self._answer(sock, pending)

    def _answer(self, sock: socket.socket, pending: _Pending) -> None:
        """Welcome or refuse who has introduced itself."""
        message = bytes(pending.received)
        said = handshake.proven(self._secret, pending.challenge, message)
        if said is None or said.purpose not in self._admit or not 0 <= said.rank < self._world_size:
            with suppress(OSError):
                sock.send(handshake.REFUSAL)
            self._drop(sock)
            return
        pending.said, pending.end = said, math.inf  # from here on a rank, whose kernel says when it is gone
        try:
            sock.send(handshake.welcome(self._secret, pending.challenge, message))
        except OSError:
            self._drop(sock)

    def _let_in(self, sock: socket.socket, said: Introduction) -> None:
        del self._pending[sock]
        self.selector.unregister(sock)
        self._admit[said.purpose](sock, said)
        self._expected -= 1
        if not self._expected:
            self._is_closing = True
