"""How a rank and rank 0 prove to each other that they know the run's secret, which neither of them sends.

    rank 0 -> rank    challenge: 32 random bytes
    rank   -> rank 0  introduction: what for, rank, host, 32 random bytes, HMAC-SHA256(secret, "rank", all of these)
    rank 0 -> rank    welcome: HMAC-SHA256(secret, "rank 0", all of these); or a refusal: 32 zeros
    rank   -> rank 0  confirmation: one byte, after which rank 0 counts the rank as here

Both random numbers are in both proofs, so that messages of another connection, also of the same run, prove nothing; the
roles are in them, so that nobody's proof can be sent back to him. It is the three-pass mutual authentication with a
cryptographic check function of ISO/IEC 9798-4. Every message has a fixed number of bytes at fixed places, and none of
them is interpreted before it is proven: nothing a stranger sends reaches a parser.

Left out: encryption, and a check of what follows on the connection. Who can change packets on their way, or has a rank
connect to himself and passes on what it says, can take a connection over once it is proven.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

NONCE_BYTES, PROOF_BYTES = 32, 32

_SAID = struct.Struct(f"!16si64s{NONCE_BYTES}s")  # what for, rank, host, random bytes
INTRODUCTION_BYTES = _SAID.size + PROOF_BYTES

REFUSAL = bytes(PROOF_BYTES)
CONFIRMATION = b"."

CONNECT_SECONDS = 10.0
"""Until an attempt to connect, and to be challenged, is given up."""

REFUSED_SECONDS = 20.0
"""For which refusals are tried again: rank 0 of the run before may still be there."""

IDLE_SECONDS, PROBE_SECONDS, PROBES = 10, 2, 7
KEEPALIVE_SECONDS = IDLE_SECONDS + PROBE_SECONDS * PROBES
"""24 s, of the minute in which a run has to know that a host is gone. The kernel of a host that is busy,
swaps or is out of threads still answers. Every outage below `PROBE_SECONDS * PROBES` = 14 s is waited out: a bond or a
spanning tree of today heals within 6 s. Where the network drops packets, seven probes in a row have to be lost or
their answers: at a loss of 1 % once in 10^12 tries, one every 10 s.
"""


@dataclass(frozen=True)
class Introduction:
    """What a rank has proven of itself: what the connection is for, its number, its host's name."""

    purpose: str
    rank: int
    host: str


class RefusedError(ConnectionError):
    """Rank 0 was reached and does not have our secret."""


def new_challenge() -> bytes:
    """Random bytes that were never sent before."""
    return secrets.token_bytes(NONCE_BYTES)


def introduction(secret: bytes, challenge: bytes, purpose: str, rank: int) -> bytes:
    """Return what `rank` says to a challenge: `INTRODUCTION_BYTES`."""
    host = socket.gethostname().encode()[:64]
    said = _SAID.pack(purpose.encode(), rank, host, secrets.token_bytes(NONCE_BYTES))
    return said + _proof("rank", secret, challenge, said)


def proven(secret: bytes, challenge: bytes, message: bytes) -> Introduction | None:
    """Read an introduction of `INTRODUCTION_BYTES`; None where who sent it does not know the secret."""
    said, proof = message[: _SAID.size], message[_SAID.size :]
    if not hmac.compare_digest(proof, _proof("rank", secret, challenge, said)):
        return None
    purpose, rank, host, _ = _SAID.unpack(said)
    return Introduction(_text(purpose), rank, _text(host))


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def welcome(secret: bytes, challenge: bytes, message: bytes) -> bytes:
    """Return rank 0's proof for an introduction."""
    return _proof("rank 0", secret, challenge, message[: _SAID.size])


def _proof(role: str, secret: bytes, challenge: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role.encode() + challenge + said, "sha256")


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel send at once what is written, and end the connection where the other host does not answer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("IDLE", IDLE_SECONDS), ("INTVL", PROBE_SECONDS), ("CNT", PROBES)):
        if hasattr(socket, f"TCP_KEEP{option}"):  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{option}"), value)


def receive(sock: socket.socket, number: int, end: float) -> bytes:
    """Return the next `number` bytes, which must be here by `end` of the monotonic clock, however they come.

    Raises:
        OSError: they are not, or the connection was closed.
    """
    received = bytearray()
    while len(received) < number:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError("no answer in time")
        sock.settimeout(left)
        part = sock.recv(min(number - len(received), 2**20))  # not beyond this message
        if not part:
            raise ConnectionResetError("it was closed")
        received += part
    return bytes(received)


def introduce(sock: socket.socket, secret: bytes, purpose: str, rank: int, end: float) -> None:
    """Prove on a new connection that this is `rank`, and that the other end is rank 0. Raises as `receive`."""
    challenge = receive(sock, NONCE_BYTES, min(end, time.monotonic() + CONNECT_SECONDS))
    message = introduction(secret, challenge, purpose, rank)
    sock.sendall(message)
    answer = receive(sock, PROOF_BYTES, end)
    if answer == REFUSAL:
        raise RefusedError("rank 0 does not have this rank's secret")
    if not hmac.compare_digest(answer, welcome(secret, challenge, message)):
        raise RefusedError("who listens there is not rank 0 of this run")
    sock.sendall(CONFIRMATION)


def connect(
    where: Callable[[], tuple[str, int]], secret: bytes, purpose: str, rank: int, seconds: float
) -> socket.socket:
    """A proven connection to rank 0, which is tried for again until it succeeds.

    `where`: the address and port, asked before each attempt.

    Raises:
        OSError: there is none after `seconds`; `RefusedError` where that is for the secret.
    """
    end, refused_until = time.monotonic() + seconds, None
    while True:
        sock = None
        try:
            left = max(0.1, end - time.monotonic())
            sock = socket.create_connection(where(), timeout=min(CONNECT_SECONDS, left))
            keep_alive(sock)
            introduce(sock, secret, purpose, rank, end)
            return sock
        except OSError as error:
            if sock is not None:
                sock.close()
            now = time.monotonic()
            if isinstance(error, RefusedError):
                refused_until = refused_until or now + REFUSED_SECONDS
            if now >= end or (isinstance(error, RefusedError) and refused_until is not None and now >= refused_until):
                raise
            time.sleep(min(0.05 + secrets.randbelow(200) / 1000, max(0.0, end - now)))
