"""Ranks learn that another is gone, and only then."""

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from frugal.distributed.first_failure import LostRankError
from frugal.distributed.peer_watch import KEEPALIVE_SECONDS, PeerWatch


class Held:
    """Three ranks' connections in one process, and what each was told."""

    def __init__(self) -> None:
        store = HashStore()
        self.told: list[list[LostRankError]] = [[], [], []]
        self.heard = threading.Event()
        self.ranks = [PeerWatch(store, rank, 3, lambda error, rank=rank: self._lost(rank, error)) for rank in range(3)]
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


def test_who_does_not_know_the_secret_is_no_rank(held: Held) -> None:
    store = HashStore()
    rank_0 = PeerWatch(store, 0, 2, lambda error: held._lost(0, error))
    port, _, _ = json.loads(store.get("frugal/peer_watch"))
    for said in (b'["wrong", 1, "there"]\n', b"GET / HTTP/1.1\n", b"[]\n", b"\xff\n", b""):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    assert not rank_0._peers
    assert not held.heard.is_set()
