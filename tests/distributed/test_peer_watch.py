"""Ranks learn that another is gone, and only then."""

import socket
import threading
from collections.abc import Iterator

import pytest

from frugal.distributed.connections.peers import KEEPALIVE_SECONDS, keep_alive
from frugal.distributed.first_failure import LostRankError
from frugal.distributed.peer_watch import PeerWatch


class Held:
    """Three ranks' connections in one process, and what each was told."""

    def __init__(self) -> None:
        self.told: list[list[LostRankError]] = [[], [], []]
        self.heard = threading.Event()
        pairs = [self._pair() for _ in range(2)]
        here = socket.gethostname()
        of_rank = [{theirs: (rank, here) for rank, (_, theirs) in enumerate(pairs, start=1)}]
        of_rank += [{own: (0, here)} for own, _ in pairs]
        self.ranks = [
            PeerWatch(connections, lambda error, rank=rank: self._lost(rank, error))
            for rank, connections in enumerate(of_rank)
        ]

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            own = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        for sock in (own, theirs):
            keep_alive(sock)
        return own, theirs

    def _lost(self, rank: int, error: LostRankError) -> None:
        self.told[rank].append(error)
        self.heard.set()


@pytest.fixture
def held() -> Iterator[Held]:
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


def test_a_run_that_is_over_before_its_watch_has_begun_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine: an exception on the thread would end the process."""
    late: list[threading.Thread] = []
    failed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda thread: late.append(thread))
        held = Held()
    for rank in held.ranks:
        rank.close()
        for sock in rank._peers:
            sock.close()
    for watch in late:
        watch.start()
    for watch in late:
        watch.join(0.3)
    assert len(late) == 3
    assert (failed, held.told) == ([], [[], [], []])


def test_a_silent_host_is_given_up_within_a_minute(held: Held) -> None:
    assert KEEPALIVE_SECONDS < 60
    for rank in held.ranks:
        for sock in rank._peers:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            seconds = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            probes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
            assert seconds + probes * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == KEEPALIVE_SECONDS
