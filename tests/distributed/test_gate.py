"""Rank 0's gate lets in who knows the secret, and strangers neither get in nor keep ranks out."""

import contextlib
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
from frugal.distributed.connections.gate import MOST_PENDING, Gate
from frugal.distributed.connections.handshake import (
    Introduction,
    RefusedError,
    connect,
    introduce,
    introduction,
    receive,
)

from frugal.distributed.connections import gate, handshake

SECRET = secrets.token_bytes(32)


class Opened:
    """A gate for rank 0 of eight, and who was let in."""

    def __init__(self) -> None:
        server = gate.listen(0, 8)
        self.port: int = server.getsockname()[1]
        self.admitted: SimpleQueue[tuple[socket.socket, Introduction]] = SimpleQueue()
        self.gate = Gate(server, SECRET, 8, {"watch": lambda sock, said: self.admitted.put((sock, said))}, 8)
        self.gate.open()

    def where(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def stranger(self) -> socket.socket:
        sock = socket.create_connection(self.where(), timeout=20)
        sock.settimeout(20)
        return sock

    def rank_gets_in(self, rank: int = 1) -> float:
        """Seconds that it takes a rank."""
        start = time.monotonic()
        with connect(self.where, SECRET, "watch", rank, 30):
            sock, said = self.admitted.get(timeout=60)
            sock.close()
            assert (said.purpose, said.rank, said.host) == ("watch", rank, socket.gethostname())
        return time.monotonic() - start


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    opened = Opened()
    yield opened
    opened.gate.close()


def is_dropped(sock: socket.socket) -> bool:
    """Whether a stranger is told nothing more than a challenge and a refusal, and is disconnected."""
    with contextlib.suppress(ConnectionResetError):
        answer = b""
        while part := sock.recv(1000):
            answer += part
        return answer[handshake.NONCE_BYTES :] in (b"", handshake.REFUSAL)
    return True


def length_of(number: int) -> bytes:
    return struct.pack("!I", number)


NESTED = b"\x96" + b"\xa1w\x01\xa1h" + b"\xc4\x00" * 2 + b"\x91" * 1005 + b"\x90"
"""MessagePack: a list of six, of which the last is 1,006 lists in each other."""

SAID = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n",
    "a length of 4 GiB": length_of(2**32 - 1) + b"x" * 1000,
    "zeros": bytes(1000),
    "a pickle": length_of(len(pickle.dumps(print))) + pickle.dumps(print),
    "1,018 bytes of nested lists": length_of(len(NESTED)) + NESTED,
    "nested lists of JSON": b"[" * 1018,
    "a proof with another secret": introduction(b"another", bytes(32), "watch", 1),
    "a proof of another challenge": introduction(SECRET, bytes(32), "watch", 1),
    "half an introduction": introduction(SECRET, bytes(32), "watch", 1)[:70],
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_a_stranger_is_dropped(said: bytes, opened: Opened) -> None:
    with opened.stranger() as sock:
        sock.sendall(said)
        with contextlib.suppress(OSError):  # it was dropped by now
            sock.shutdown(socket.SHUT_WR)
        assert is_dropped(sock)
    assert opened.admitted.empty()
    opened.rank_gets_in()


def test_a_stranger_with_another_secret_is_refused(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "REFUSED_SECONDS", 0.5)
    with pytest.raises(RefusedError, match="rank 0 does not have this rank's secret"):
        connect(opened.where, b"another", "watch", 1, 30)
    assert opened.admitted.empty()


def test_a_rank_that_there_is_not_and_a_purpose_that_there_is_not_are_refused(opened: Opened) -> None:
    for purpose, rank in (("watch", 8), ("watch", -1), ("shell", 1)):
        with opened.stranger() as sock, pytest.raises(RefusedError):
            introduce(sock, SECRET, purpose, rank, time.monotonic() + 10)
    assert opened.admitted.empty()


def test_a_recorded_handshake_is_of_no_use(opened: Opened) -> None:
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def relay() -> None:
            with opened.stranger() as to_gate, listener.accept()[0] as to_rank:
                to_rank.sendall(to_gate.recv(1000))
                recorded.append(to_rank.recv(1000))
                to_gate.sendall(recorded[0])
                recorded.append(to_gate.recv(1000))
                to_rank.sendall(recorded[1])
                to_gate.sendall(to_rank.recv(1000))

        thread = threading.Thread(target=relay)
        thread.start()
        connect(lambda: ("127.0.0.1", port), SECRET, "watch", 1, 10).close()  # over a wire that is listened to
        thread.join()
    opened.admitted.get(timeout=60)
    with opened.stranger() as sock:
        sock.sendall(recorded[0])
        assert is_dropped(sock)
    assert opened.admitted.empty()


def listens(behave: Callable[[socket.socket], None]) -> tuple[str, int]:
    """Where somebody else than rank 0 listens, who does this to the first who connects."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener, listener.accept()[0] as sock:
            behave(sock)

    threading.Thread(target=run, daemon=True).start()
    return "127.0.0.1", listener.getsockname()[1]


def test_a_rank_does_not_take_its_own_proof_for_that_of_rank_0() -> None:
    def reflect(sock: socket.socket) -> None:
        sock.sendall(b"c" * 32)
        sock.sendall(receive(sock, handshake.INTRODUCTION_BYTES, time.monotonic() + 10)[-handshake.PROOF_BYTES :])

    with socket.create_connection(listens(reflect)) as sock, pytest.raises(RefusedError, match="is not rank 0"):
        introduce(sock, SECRET, "watch", 1, time.monotonic() + 10)


def test_a_server_that_dribbles_does_not_hold_a_rank_beyond_its_time() -> None:
    def dribble(sock: socket.socket) -> None:
        for byte in b"c" * 32:
            sock.sendall(bytes([byte]))
            time.sleep(0.2)

    start = time.monotonic()
    with socket.create_connection(listens(dribble)) as sock, pytest.raises(TimeoutError):
        introduce(sock, SECRET, "watch", 1, time.monotonic() + 1)
    assert time.monotonic() - start < 5


def test_a_dribble_is_cut_off_and_nobody_waits_for_it(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "HANDSHAKE_SECONDS", 2.0)
    with opened.stranger() as sock:
        start = time.monotonic()
        with pytest.raises(OSError):  # a reset or a broken pipe, as the kernel has it
            for byte in bytes(handshake.INTRODUCTION_BYTES):
                sock.sendall(bytes([byte]))
                opened.rank_gets_in()
                opened.gate._expected += 1  # a gate that does not close for all that got in
                time.sleep(0.1)
        assert time.monotonic() - start < 30


def test_half_open_connections_neither_exhaust_it_nor_keep_a_rank_out(opened: Opened) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(opened.stranger()) for _ in range(MOST_PENDING + 100)]
        opened.rank_gets_in()
        assert len(opened.gate._pending) <= MOST_PENDING
        assert is_dropped(idle[0]), "the oldest goes first"


def from_address(opened: Opened, number: int) -> socket.socket:
    """A connection from one of 65,000 addresses of this host, each of which stands for another host."""
    source = (f"127.1.{number // 256}.{number % 256}", 0)
    return socket.create_connection(opened.where(), timeout=20, source_address=source)


def test_of_a_flood_the_flooders_own_connections_are_dropped(opened: Opened) -> None:
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(from_address(opened, 1))
        for _ in range(MOST_PENDING + 200):
            stack.enter_context(opened.stranger())
        introduce(rank, SECRET, "watch", 3, time.monotonic() + 10)
    assert opened.admitted.get(timeout=60)[1].rank == 3


def test_a_flood_from_256_addresses_does_not_push_out_the_ranks_of_one_host(opened: Opened) -> None:
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(opened.stranger()) for _ in range(8)]
        for number in range(300):
            stack.enter_context(from_address(opened, number))
        for number, rank in enumerate(ranks):
            introduce(rank, SECRET, "watch", number, time.monotonic() + 10)
    assert {opened.admitted.get(timeout=60)[1].rank for _ in ranks} == set(range(8))


def test_ranks_get_in_while_a_flood_from_256_addresses_goes_on(opened: Opened) -> None:
    is_over, made = threading.Event(), []

    def flood(first: int) -> None:
        held: list[socket.socket] = []
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                held.append(from_address(opened, first + len(made) % 128))
                made.append(1)
            if len(held) > MOST_PENDING:
                held.pop(0).close()
            time.sleep(0.001)  # the gate is in this process, too
        for sock in held:
            sock.close()

    floods = [threading.Thread(target=flood, args=(first,)) for first in (0, 128)]
    for thread in floods:
        thread.start()
    try:
        while len(made) < MOST_PENDING:
            time.sleep(0.01)
        with contextlib.ExitStack() as stack:
            for rank in range(8):
                stack.enter_context(connect(opened.where, SECRET, "watch", rank, 120))
            assert {opened.admitted.get(timeout=60)[1].rank for _ in range(8)} == set(range(8))
    finally:
        is_over.set()
        for thread in floods:
            thread.join()


def test_a_rank_whose_welcome_is_aborted_has_taken_no_place(opened: Opened) -> None:
    for _ in range(8):
        with opened.stranger() as sock:
            challenge = receive(sock, handshake.NONCE_BYTES, time.monotonic() + 10)
            sock.sendall(introduction(SECRET, challenge, "watch", 1))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
    with contextlib.ExitStack() as stack:
        for rank in range(8):
            stack.enter_context(connect(opened.where, SECRET, "watch", rank, 10))
        assert {opened.admitted.get(timeout=60)[1].rank for _ in range(8)} == set(range(8))
    assert opened.admitted.empty()


def test_the_kernel_watches_connections_before_anybody_has_proven_anything(opened: Opened) -> None:
    with opened.stranger() as sock, connect(opened.where, SECRET, "watch", 1, 10) as rank:
        receive(sock, handshake.NONCE_BYTES, time.monotonic() + 10)
        admitted, _ = opened.admitted.get(timeout=60)
        (pending,) = opened.gate._pending
        for each in (pending, admitted, rank):
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == handshake.IDLE_SECONDS


def test_nothing_listens_any_more_once_all_ranks_are_in(opened: Opened) -> None:
    ranks = [connect(opened.where, SECRET, "watch", rank, 10) for rank in range(8)]
    end = time.monotonic() + 10
    with pytest.raises(ConnectionRefusedError):
        while time.monotonic() < end:
            socket.create_connection(opened.where(), timeout=5).close()
            time.sleep(0.05)
    for sock in ranks:
        sock.close()


def test_it_listens_where_ranks_reach_it_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node1")  # ranks of one host do not ask who that is
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with gate.listen(0, 2) as server:
        assert server.getsockname()[0] == "127.0.0.1"
