"""Ranks learn that another is gone, and only then."""

import socket
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from frugal.distributed.connections.gate import Gate
from frugal.distributed.connections.handshake import Introduction, connect

from frugal.distributed.connections import gate
from frugal.distributed.first_failure import LostRankError
from frugal.distributed.peer_watch import KEEPALIVE_SECONDS, PeerWatch


class Held:
    """Three ranks' connections in one process, and what each was told."""

    def __init__(self) -> None:
        self.told: list[list[LostRankError]] = [[], [], []]
        self.heard = threading.Event()
        arriving: SimpleQueue[tuple[socket.socket, Introduction]] = SimpleQueue()
        server = gate.listen(0, 3)
        address = server.getsockname()[:2]
        Gate(server, b"secret", 3, {"watch": lambda sock, said: arriving.put((sock, said))}, 2).open()
        self.ranks = [
            PeerWatch(
                rank, 3, lambda error, rank=rank: self._lost(rank, error), arriving,
                lambda rank=rank: (connect(lambda: address, b"secret", "watch", rank, 10), socket.gethostname()),
            )
            for rank in range(3)
        ]  # fmt: skip
        while len(self.ranks[0]._peers) < 2:
            time.sleep(0.01)

    def _lost(self, rank: int, error: LostRankError) -> None:
        self.told[rank].append(error)
        self.heard.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    held = Held()
    yield held
    for rank in held.ranks:
        rank.close()


def test_a_rank_that_vanishes_is_noticed_at_once_and_named(held: Held) -> None:
    (own,) = held.ranks[2]._peers
    held.ranks[2]._is_closing = True
    own.shutdown(socket.SHUT_RDWR)  # what its kernel does when it is killed
    assert held.heard.wait(10)
    (error,) = held.told[0]
    assert str(error) == f"rank 2 on {socket.gethostname()} is gone"
    assert (error.why, error.is_unreachable, error.is_elsewhere) == ("its connection was closed", False, False)


def test_a_run_that_is_closing_is_no_loss(held: Held) -> None:
    for rank in held.ranks:
        rank.close()
    for rank in held.ranks:
        for sock in rank._peers:
            sock.close()
    assert not held.heard.wait(0.5)


def test_a_silent_host_is_given_up_within_a_minute(held: Held) -> None:
    assert KEEPALIVE_SECONDS < 60
    for rank in held.ranks:
        for sock in rank._peers:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            seconds = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            probes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
            assert seconds + probes * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == KEEPALIVE_SECONDS
