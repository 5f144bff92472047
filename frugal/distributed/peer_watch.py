"""Notices a rank that is gone where nothing else does: a host without power, a cut cable, a killed process.

A collective waits for a rank that will never come until its timeout, ten minutes by default, and NCCL's waits also for
one that was killed. A shorter timeout would end healthy runs, too: the first step compiles, a checkpoint takes minutes.
So every rank holds a TCP connection to rank 0, proven at its gate, on which nothing is sent. The kernels at both ends
keep it alive, however busy the processes are: a killed one closes it, and where a host does not answer the other kernel
gives up after `KEEPALIVE_SECONDS`. Rank 0 then ends, which closes all the others.

Left out: a stopped process (SIGSTOP), whose kernel goes on answering; a cut between two hosts that both reach rank 0.
"""

import errno
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from frugal.distributed.connections.handshake import KEEPALIVE_SECONDS, Introduction
from frugal.distributed.first_failure import LostRankError

_ARRIVAL_SECONDS = 0.2  # between looks for ranks that have come
_GOODBYE = b"."


class PeerWatch:
    """This rank's end of the connections: to rank 0, or on rank 0 to the others, as they come in `arriving`.

    `on_lost` is called on a thread of its own, once, with what happened.
    """

    def __init__(
        self, rank: int, world_size: int, on_lost: Callable[[LostRankError], None],
        arriving: "SimpleQueue[tuple[socket.socket, Introduction]]", to_rank_0: Callable[[], tuple[socket.socket, str]],
    ) -> None:  # fmt: skip
        self._on_lost = on_lost
        self._is_closing = False
        self._arriving = arriving
        self._peers: dict[socket.socket, tuple[int, str]] = {}  # rank and host
        if rank != 0:
            sock, host = to_rank_0()
            self._add(sock, 0, host)
        num_peers = world_size - 1 if rank == 0 else 1
        threading.Thread(target=self._watch, args=(num_peers,), name="frugal peer watch", daemon=True).start()

    def close(self) -> None:
        """Say goodbye: what closes from now on is no loss. After a barrier, so that no rank is still at work."""
        self._is_closing = True
        for sock in list(self._peers):
            with suppress(OSError):
                sock.sendall(_GOODBYE)

    def _add(self, sock: socket.socket, rank: int, host: str) -> None:
        sock.setblocking(True)
        self._peers[sock] = rank, host

    def _watch(self, num_peers: int) -> None:
        """Wait for `num_peers` goodbyes, or for the first connection that ends without one."""
        goodbyes = 0
        with selectors.DefaultSelector() as selector:
            for sock in self._peers:
                selector.register(sock, selectors.EVENT_READ)
            while goodbyes < num_peers:
                with suppress(Empty):
                    while len(self._peers) < num_peers:
                        sock, said = self._arriving.get_nowait()
                        self._add(sock, said.rank, said.host)
                        selector.register(sock, selectors.EVENT_READ)
                for key, _ in selector.select(None if len(self._peers) == num_peers else _ARRIVAL_SECONDS):
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    selector.unregister(ready)
                    if (error := self._reason_for_end(ready)) is None or self._is_closing:
                        goodbyes += 1
                    else:
                        self._on_lost(error)
                        return

    def _reason_for_end(self, sock: socket.socket) -> LostRankError | None:
        """Why a connection ended; None if with a goodbye."""
        rank, host = self._peers[sock]
        is_unreachable = False
        try:
            if sock.recv(1) == _GOODBYE:
                return None
            why = "its connection was closed"
        except OSError as error:
            is_unreachable = isinstance(error, TimeoutError) or error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
            why = f"its host has not answered for {KEEPALIVE_SECONDS} s" if is_unreachable else str(error.strerror)
        return LostRankError(
            f"rank {rank} on {host} is gone",
            why,
            is_elsewhere=host != socket.gethostname(),
            is_unreachable=is_unreachable,
        )
