"""Ranks connect to rank 0 by the run's secret; strangers neither get in nor keep ranks out."""

import asyncio
import contextlib
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from frugal.distributed.connections import peers
from frugal.distributed.connections.peers import MOST_PENDING, accept_ranks, connect, listen

KEY = secrets.token_bytes(32)


class Opened:
    """Rank 0 of eight, which accepts the others on a thread."""

    def __init__(self) -> None:
        server = listen(0)
        self.address: tuple[str, int] = server.getsockname()[:2]
        self.accepted: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, args=(server,), daemon=True)
        self._thread.start()

    def _accept(self, server: socket.socket) -> None:
        with server:
            self.accepted = accept_ranks(server, KEY, 8, time.monotonic() + 120)

    def stranger(self, source: str = "127.0.0.1") -> socket.socket:
        sock = socket.create_connection(self.address, timeout=20, source_address=(source, 0))
        sock.settimeout(20)
        return sock

    def all_ranks_get_in(self) -> list[socket.socket]:
        """Connect all ranks, the last one first, and return their ends in rank order."""
        ranks = [self.rank(number) for number in range(7, 0, -1)][::-1]
        self._thread.join(60)
        assert len(self.accepted) == 7
        for number, (own, theirs) in enumerate(zip(ranks, self.accepted, strict=True), start=1):
            own.sendall(bytes([number]))
            theirs.settimeout(10)
            assert theirs.recv(1) == bytes([number]), "they are in rank order"
        return ranks

    def rank(self, number: int) -> socket.socket:
        return connect(self.address, KEY, number, time.monotonic() + 60)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield Opened()


def test_ranks_meet_from_inside_an_event_loop_too(opened: Opened) -> None:
    """As in a notebook, where a loop runs already."""

    async def meet() -> None:
        opened.all_ranks_get_in()

    asyncio.run(meet())


def is_dropped(sock: socket.socket) -> bool:
    """Return whether a stranger is sent nothing but a challenge, and is disconnected."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1000):
            answer += part
    return len(answer) <= 32


def introduction(key: bytes, challenge: bytes, rank: int) -> bytes:
    claim = peers._CLAIM.pack(rank, bytes(32))
    return claim + peers._proof("rank", key, challenge, claim)


SENT = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n" + bytes(100),
    "a pickle": pickle.dumps(print) + bytes(100),
    "nested lists": b"\x91" * 1005 + b"\x90",
    "a proof with another secret": introduction(b"another", bytes(32), 1),
    "a proof of another challenge": introduction(KEY, bytes(32), 1),
    "half an introduction": introduction(KEY, bytes(32), 1)[:40],
}


def test_strangers_ranks_that_do_not_exist_and_recorded_introductions_are_dropped_and_ranks_get_in(
    opened: Opened,
) -> None:
    for name, sent in SENT.items():
        with opened.stranger() as sock:
            sock.sendall(sent)
            with contextlib.suppress(OSError):  # it was dropped by now
                sock.shutdown(socket.SHUT_WR)
            assert is_dropped(sock), name
    for rank in (0, 8, 2**32 - 1):
        with opened.stranger() as sock:
            sock.sendall(introduction(KEY, sock.recv(32), rank))
            sock.shutdown(socket.SHUT_WR)
            sock.recv(32)
            assert is_dropped(sock)
    with opened.stranger() as sock:
        recorded = introduction(KEY, sock.recv(32), 1)
        sock.sendall(recorded)
        assert len(sock.recv(32)) == 32, "it was proven, and is not confirmed"
    with opened.stranger() as sock:
        sock.sendall(recorded)
        assert is_dropped(sock)
    for sock in opened.all_ranks_get_in():
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1, "the kernel watches from the start"
    assert {sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) for sock in opened.accepted} == {
        peers.IDLE_SECONDS
    }
    with pytest.raises(ConnectionRefusedError):  # nothing listens any more
        opened.stranger()


def listens(behave: Callable[[socket.socket], None]) -> tuple[str, int]:
    """Return an address where something else than rank 0 listens, which does this to the first connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener, listener.accept()[0] as sock, contextlib.suppress(OSError):
            behave(sock)

    threading.Thread(target=run, daemon=True).start()
    return "127.0.0.1", listener.getsockname()[1]


def test_a_rank_does_not_take_its_own_proof_for_that_of_rank_0() -> None:
    def reflect(sock: socket.socket) -> None:
        sock.sendall(b"c" * 32)
        sock.sendall(sock.recv(peers._INTRODUCTION_BYTES, socket.MSG_WAITALL)[-32:])

    with pytest.raises(OSError, match=r"is not rank 0|refused|closed|reset|timed out|no answer"):
        connect(listens(reflect), KEY, 1, time.monotonic() + 0.5)


def test_a_server_that_dribbles_does_not_hold_a_rank_beyond_its_time() -> None:
    def dribble(sock: socket.socket) -> None:
        for byte in b"c" * 32:
            sock.sendall(bytes([byte]))
            time.sleep(0.2)

    start = time.monotonic()
    with pytest.raises(OSError):
        connect(listens(dribble), KEY, 1, start + 1)
    assert time.monotonic() - start < 5


def test_a_dribble_is_cut_off(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HANDSHAKE_SECONDS", 1.0)
    with opened.stranger() as sock, pytest.raises(OSError):  # a reset or a broken pipe, as the kernel has it
        for byte in bytes(peers._INTRODUCTION_BYTES):
            sock.sendall(bytes([byte]))
            time.sleep(0.1)
    opened.all_ranks_get_in()


def test_a_flood_drops_its_own_connections_and_not_those_of_ranks(opened: Opened) -> None:
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(opened.stranger("127.1.0.1"))
        flood = [stack.enter_context(opened.stranger()) for _ in range(MOST_PENDING + 200)]
        assert is_dropped(flood[0]), "the oldest goes first"
        rank.sendall(introduction(KEY, rank.recv(32), 3))
        assert len(rank.recv(32)) == 32
        rank.sendall(b".")
        opened.all_ranks_get_in()


def test_a_flood_from_a_rank_s_own_host_does_not_drop_it_once_it_has_proven_itself(opened: Opened) -> None:
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(opened.stranger())
        rank.sendall(introduction(KEY, rank.recv(32), 3))
        assert len(rank.recv(32)) == 32, "from here on it may count itself as connected"
        flood = [stack.enter_context(opened.stranger()) for _ in range(MOST_PENDING + 200)]
        assert is_dropped(flood[0])
        rank.sendall(b".")
        for number in (1, 2, 4, 5, 6, 7):
            stack.enter_context(opened.rank(number))
        opened._thread.join(60)
        opened.accepted[2].sendall(b"3")
        assert rank.recv(1) == b"3"


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with listen(0) as server, pytest.raises(TimeoutError, match="rank 1, 2 did not connect to rank 0 in time"):
        accept_ranks(server, KEY, 3, time.monotonic() + 0.1)


def test_it_listens_where_ranks_reach_it_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MASTER_ADDR", "node1"), ("LOCAL_SIZE", "2"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)  # ranks of one host do not ask who that is
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with listen(0) as server:
        assert server.getsockname()[0] == "127.0.0.1"
