"""How a rank and rank 0 prove to each other that they know the run's secret, which neither of them sends.

    rank 0 -> rank    challenge: 32 random bytes
    rank   -> rank 0  introduction: what for, rank, host, 32 random bytes, HMAC-SHA256(secret, "rank", all of these)
    rank 0 -> rank    welcome: HMAC-SHA256(secret, "rank 0", all of these)

Both random numbers are in both proofs, so that messages of another connection, also of the same run, prove nothing; the
roles are in them, so that nobody's proof can be sent back to him. It is the three-pass mutual authentication with a
cryptographic check function of ISO/IEC 9798-4. A frame is its length in 4 bytes, and msgspec's MessagePack.

Left out: encryption, and a check of what follows on the connection. Who can change packets on their way, or has a rank
connect to himself and passes on what it says, can take a connection over once it is proven.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

NONCE_BYTES, PROOF_BYTES = 32, 32
MOST_BYTES = 1024
"""Of a frame before its sender has proven itself."""

CONNECT_SECONDS = 10.0
"""Until an attempt to connect, and to be challenged, is given up."""

REFUSED_SECONDS = 20.0
"""For which refusals are tried again: rank 0 of the run before may still be there."""

_LENGTH = struct.Struct("!I")
T = TypeVar("T")


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of itself, and its proof: what the connection is for, its number, its host's name."""

    purpose: str
    rank: int
    host: str
    nonce: bytes
    proof: bytes = b""

    def proof_of(self, role: str, secret: bytes, challenge: bytes) -> bytes:
        """The proof that `role` knows the secret, for this introduction to that challenge."""
        said = [role, challenge, self.purpose, self.rank, self.host, self.nonce]
        return hmac.digest(secret, msgspec.msgpack.encode(said), "sha256")

    def is_proven(self, secret: bytes, challenge: bytes) -> bool:
        """Whether who says this knows the secret."""
        return hmac.compare_digest(self.proof, self.proof_of("rank", secret, challenge))


class RefusedError(ConnectionError):
    """Rank 0 was reached and does not have our secret."""


def new_challenge() -> bytes:
    """Random bytes that were never sent before."""
    return secrets.token_bytes(NONCE_BYTES)


def frame(value: Any) -> bytes:
    """A value as it is sent."""
    message = msgspec.msgpack.encode(value)
    return _LENGTH.pack(len(message)) + message


REFUSAL = _LENGTH.pack(0)


def first_frame(received: bytearray, most_bytes: int) -> bytearray | None:
    """Take the first message out of what was received; None: it is not complete yet.

    Raises:
        ValueError: it is longer than may be.
    """
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    if length > most_bytes:
        raise ValueError(f"a message of {length} bytes, where {most_bytes} are the most")
    end = _LENGTH.size + length
    if len(received) < end:
        return None
    message = received[_LENGTH.size : end]
    del received[:end]
    return message


def receive(sock: socket.socket, kind: type[T], end: float, most_bytes: int = MOST_BYTES) -> T:
    """The next message, of type `kind`, which must be here by `end` of the monotonic clock, however its bytes come.

    Raises:
        OSError: it is not, or the connection was closed, or refused.
        ValueError: it is something else.
    """
    received = bytearray()
    while (message := first_frame(received, most_bytes)) is None:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError("no answer in time")
        sock.settimeout(left)
        wanted = _LENGTH.unpack_from(received)[0] + _LENGTH.size if len(received) >= _LENGTH.size else _LENGTH.size
        part = sock.recv(min(wanted - len(received), 2**20))  # not beyond this message
        if not part:
            raise ConnectionResetError("it was closed")
        received += part
    if not message:
        raise RefusedError("rank 0 does not have this rank's secret")
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"a message that is something else: {error}") from None


def introduce(sock: socket.socket, secret: bytes, purpose: str, rank: int, end: float) -> None:
    """Prove on a new connection that this is `rank`, and that the other end is rank 0. Raises as `receive`."""
    challenge = receive(sock, bytes, min(end, time.monotonic() + CONNECT_SECONDS))
    bare = Introduction(purpose, rank, socket.gethostname()[:200], new_challenge())
    sock.sendall(frame(msgspec.structs.replace(bare, proof=bare.proof_of("rank", secret, challenge))))
    # Not given up before `end`: rank 0 may have let us in, and would take a closed connection for a lost rank.
    if not hmac.compare_digest(receive(sock, bytes, end), bare.proof_of("rank 0", secret, challenge)):
        raise RefusedError("who listens there is not rank 0 of this run")


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
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            introduce(sock, secret, purpose, rank, end)
            return sock
        except (OSError, ValueError) as error:
            if sock is not None:
                sock.close()
            now = time.monotonic()
            if isinstance(error, RefusedError):
                refused_until = refused_until or now + REFUSED_SECONDS
            if now >= end or (isinstance(error, RefusedError) and refused_until is not None and now >= refused_until):
                raise error if isinstance(error, OSError) else ConnectionError(str(error)) from None
            time.sleep(min(0.05 + secrets.randbelow(200) / 1000, max(0.0, end - now)))
