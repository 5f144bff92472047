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

from frugal.distributed.connections import gate, handshake
from frugal.distributed.connections.gate import MOST_PENDING, Gate
from frugal.distributed.connections.handshake import Introduction, RefusedError, connect, frame, receive

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
            sock, said = self.admitted.get(timeout=5)
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
        return len(answer) <= len(frame(handshake.new_challenge())) + len(handshake.REFUSAL)
    return True


def length_of(number: int) -> bytes:
    return struct.pack("!I", number)


def introduction(proof: bytes, **more: object) -> bytes:
    words = {"purpose": "watch", "rank": 1, "host": "n1", "nonce": b"n" * 32} | more
    return frame(Introduction(**words, proof=proof))  # type: ignore[arg-type]  # some are of a wrong type on purpose


SAID = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n",
    "a length of 4 GiB": length_of(2**32 - 1) + b"x" * 1000,
    "no length": length_of(0),
    "a pickle": length_of(len(pickle.dumps(print))) + pickle.dumps(print),
    "nested lists": length_of(900) + b"\x91" * 900,
    "a list of 2**32 - 1": length_of(5) + b"\xdd\xff\xff\xff\xff",
    "no proof": introduction(b""),
    "a proof of zeros": introduction(bytes(32)),
    "a rank that is a word": introduction(bytes(32), rank="1"),
    "a host that is no text": length_of(40) + b"\x95\xa1w\x01\xa2\xff\xfe" + b"\xc4\x00" * 2,
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_a_stranger_is_dropped(said: bytes, opened: Opened) -> None:
    with opened.stranger() as sock:
        sock.sendall(said)
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
            handshake.introduce(sock, SECRET, purpose, rank, time.monotonic() + 10)
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

        thread = threading.Thread(target=relay)
        thread.start()
        connect(lambda: ("127.0.0.1", port), SECRET, "watch", 1, 10).close()  # over a wire that is listened to
        thread.join()
    opened.admitted.get(timeout=5)
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
        sock.sendall(frame(b"c" * 32))
        said = receive(sock, Introduction, time.monotonic() + 10)
        sock.sendall(frame(said.proof))

    with socket.create_connection(listens(reflect)) as sock, pytest.raises(RefusedError, match="is not rank 0"):
        handshake.introduce(sock, SECRET, "watch", 1, time.monotonic() + 10)


def test_a_server_that_dribbles_does_not_hold_a_rank_beyond_its_time() -> None:
    def dribble(sock: socket.socket) -> None:
        for byte in frame(b"c" * 32):
            sock.sendall(bytes([byte]))
            time.sleep(0.2)

    start = time.monotonic()
    with socket.create_connection(listens(dribble)) as sock, pytest.raises(TimeoutError):
        handshake.introduce(sock, SECRET, "watch", 1, time.monotonic() + 1)
    assert time.monotonic() - start < 5


def test_a_dribble_is_cut_off_and_nobody_waits_for_it(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "HANDSHAKE_SECONDS", 2.0)
    with opened.stranger() as sock:
        start = time.monotonic()
        with pytest.raises(OSError):  # a reset or a broken pipe, as the kernel has it
            for byte in length_of(900) + bytes(900):
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


def test_of_a_flood_the_flooders_own_connections_are_dropped(opened: Opened) -> None:
    """Another address of this host stands for another host."""
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(socket.create_connection(opened.where(), source_address=("127.0.0.2", 0)))
        for _ in range(2 * MOST_PENDING):
            stack.enter_context(opened.stranger())
        handshake.introduce(rank, SECRET, "watch", 3, time.monotonic() + 10)
    assert opened.admitted.get(timeout=5)[1].rank == 3


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
