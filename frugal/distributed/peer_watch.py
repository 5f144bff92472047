"""Notices a rank that is gone where nothing else does: a host without power, a cut cable, a killed process.

A collective waits for a rank that will never come until its timeout, ten minutes by default, and NCCL waits as long for
one that was killed. A shorter timeout would end healthy runs, too: the first step compiles, a checkpoint takes minutes.
So every rank holds an authenticated TCP connection to rank 0 on which nothing is sent. The kernels at both ends keep
it alive, however busy the processes are: a killed process closes it, and when a host does not answer the other kernel
gives up after `KEEPALIVE_SECONDS`. Rank 0 then ends, which closes all the others.

Left out: a stopped process (SIGSTOP), whose kernel still answers; a cut between two hosts that both reach rank 0.
"""

import errno
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from frugal.distributed import env, rendezvous
from frugal.distributed.connections import peers
from frugal.distributed.first_failure import LostRankError

_GOODBYE = b"."


def watch_peers(on_lost: Callable[[LostRankError], None]) -> "PeerWatch":
    """Connect every rank of the rendezvous to rank 0, and watch the connections. Collective; see `PeerWatch`."""
    hosts = rendezvous.hosts()
    connections = peers.connect_ranks(
        env.rank(), len(hosts), lambda port: rendezvous.share("watch", port, peers.PeerPort)
    )
    ranks = range(1, len(hosts)) if env.rank() == 0 else [0]
    return PeerWatch({sock: (rank, hosts[rank]) for sock, rank in zip(connections, ranks, strict=True)}, on_lost)


class PeerWatch:
    """A watch over connections to other ranks: `connections` maps each to its rank and host.

    `on_lost` is called once, on the thread of the watch, with the rank that is lost and why.
    """

    def __init__(
        self, connections: Mapping[socket.socket, tuple[int, str]], on_lost: Callable[[LostRankError], None]
    ) -> None:
        self._peers, self._on_lost = connections, on_lost
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        for sock in connections:
            self._selector.register(sock, selectors.EVENT_READ)
        threading.Thread(target=self._watch, name="frugal peer watch", daemon=True).start()

    def close(self) -> None:
        """Say goodbye: a connection that closes from now on is no loss. After a barrier: no rank is still at work."""
        self._is_closing = True
        for sock in self._peers:
            with suppress(OSError):
                sock.sendall(_GOODBYE)

    def _watch(self) -> None:
        """Wait for a goodbye from each peer, or for the first connection that ends without one."""
        with self._selector as selector:
            while selector.get_map():
                for key, _ in selector.select():
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    selector.unregister(ready)
                    error = self._reason_for_end(ready)
                    if error is not None and not self._is_closing:
                        self._on_lost(error)
                        return

    def _reason_for_end(self, sock: socket.socket) -> LostRankError | None:
        """Return why a connection ended; None if with a goodbye."""
        rank, host = self._peers[sock]
        is_unreachable = False
        try:
            if sock.recv(1) == _GOODBYE:
                return None
            why = "its connection was closed"
        except OSError as error:
            is_unreachable = isinstance(error, TimeoutError) or error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
            why = (
                f"its host has not answered for {peers.KEEPALIVE_SECONDS} s" if is_unreachable else str(error.strerror)
            )
        return LostRankError(
            f"rank {rank} on {host} is gone",
            why,
            is_elsewhere=host != socket.gethostname(),
            is_unreachable=is_unreachable,
        )
