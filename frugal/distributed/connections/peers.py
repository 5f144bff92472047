"""Authenticated connections of all ranks to rank 0, which votes and the peer watch use.

Both ends prove that they know `key`: the run's secret, followed by bytes that rank 0 draws for each use.

    rank 0 -> rank    challenge: 32 random bytes
    rank   -> rank 0  its number, 32 random bytes, HMAC-SHA256(key, "rank", challenge, number, random bytes)
    rank 0 -> rank    HMAC-SHA256(key, "rank 0", challenge, number, random bytes)
    rank   -> rank 0  confirmation: one byte, after which rank 0 counts the rank as connected

This is the mutual authentication with a cryptographic check function of ISO/IEC 9798-4. Both random numbers are in both
proofs, so a recorded message proves nothing; the role is, too, so nobody's proof can be sent back. Every message has a
fixed size, and its proof is compared before anything else in it is read. Rank 0 listens only until all ranks are in.

Left out: encryption, and authentication of what follows: a machine in the middle can take the connection over.
"""

import hmac
import math
import os
import resource
import secrets
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import psutil  # type: ignore[import-untyped]  # has no types

from frugal.distributed import env
from frugal.distributed.connections import secret

CONNECT_SECONDS = 300.0
"""After this time a rank that has not connected is an error: it may have been suspended, or be under attack."""

HANDSHAKE_SECONDS = 10.0
"""A connection that has not proven itself after this time is dropped, however slowly its bytes come."""

MOST_PENDING = 1024
"""With more unproven connections the oldest one of the address that has most of them is dropped.

The fastest flood takes `MOST_PENDING` / `_ACCEPTED_AT_ONCE` * `_PAUSE_SECONDS` = 0.16 s to push out a rank of its own
address that does not answer meanwhile, and that tries again. A rank that has proven itself is never pushed out: it may
have confirmed, and count itself as connected, before rank 0 comes to read that.
"""

MOST_DESCRIPTORS = 2**16
"""Rank 0's limit on open files, where it may be raised: TCPStore keeps every connection, also a stranger's."""

IDLE_SECONDS, PROBE_SECONDS, PROBES = 10, 2, 7
KEEPALIVE_SECONDS = IDLE_SECONDS + PROBE_SECONDS * PROBES
"""24 s until the kernel gives up a connection whose other host is silent. A host that is busy or swaps still answers.
Outages below `PROBE_SECONDS * PROBES` = 14 s are waited out. At a packet loss of 1 % seven lost probes in a row occur
once in 10^12 tries, of which there is one every 10 s.
"""

_RANDOM_BYTES, _PROOF_BYTES = 32, 32
_CLAIM = struct.Struct(f"!I{_RANDOM_BYTES}s")  # rank, random bytes
_INTRODUCTION_BYTES = _CLAIM.size + _PROOF_BYTES
_CONFIRMATION = b"."
_ACCEPTED_AT_ONCE, _PAUSE_SECONDS = 64, 0.01  # so that a flood leaves the other ranks most of a host's time
_POLL_SECONDS = 0.2


class PeerPort(msgspec.Struct):
    """A port of rank 0, and the random bytes in the key of its connections."""

    port: int
    nonce: bytes


def connect_ranks(
    rank: int, world_size: int, share: Callable[[PeerPort], PeerPort], seconds: float = CONNECT_SECONDS
) -> list[socket.socket]:
    """Return rank 0's connections to all other ranks in rank order, or another rank's one to rank 0. Collective.

    `share` sends rank 0's value to all ranks.

    Raises:
        RuntimeError: a rank did not connect within `seconds`.
    """
    end = time.monotonic() + seconds
    try:
        if rank == 0:
            with listen(0) as server:
                port = share(PeerPort(server.getsockname()[1], secrets.token_bytes(_RANDOM_BYTES)))
                return accept_ranks(server, _key(port), world_size, end)
        port = share(PeerPort(0, b""))
        return [connect((address_of_rank_0(), port.port), _key(port), rank, end)]
    except OSError as error:
        raise RuntimeError(f"Connection to another rank was not made: {error}") from error


def _key(port: PeerPort) -> bytes:
    return (secret.of_run() or b"") + port.nonce


def address_of_rank_0() -> str:
    """Return the address at which ranks reach rank 0."""
    return env.LOOPBACK if env.is_on_one_host() else os.environ["MASTER_ADDR"]


def listen(port: int) -> socket.socket:
    """Return a listening socket of rank 0, bound to the address at which the other ranks reach it.

    It is bound to all addresses where that one is not an address of this host (behind NAT), or where its name means the
    loopback here, as on Debian.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MOST_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    family, _, _, _, resolved = socket.getaddrinfo(address_of_rank_0(), port, type=socket.SOCK_STREAM)[0]
    address = str(resolved[0])
    own = {each.address.split("%")[0] for addresses in psutil.net_if_addrs().values() for each in addresses}
    is_loopback = address.startswith("127.") or address == "::1"
    if not env.is_on_one_host() and (address not in own or is_loopback):
        address = ""
    return socket.create_server((address, port), family=family, backlog=1024)


@dataclass
class _Pending:
    """A connection that is not accepted yet; `rank` is what it has proven to be."""

    address: str
    end: float
    challenge: bytes
    received: bytearray = field(default_factory=bytearray)
    rank: int | None = None


def accept_ranks(server: socket.socket, key: bytes, world_size: int, end: float) -> list[socket.socket]:
    """Return a proven connection from each rank but 0, in rank order, whatever else connects to `server`.

    Raises:
        TimeoutError: some rank has not connected by `end` of the monotonic clock.
    """
    server.setblocking(False)
    proven: dict[int, socket.socket] = {}
    pending: dict[socket.socket, _Pending] = {}
    with selectors.DefaultSelector() as selector:

        def drop(sock: socket.socket) -> None:
            del pending[sock]
            selector.unregister(sock)
            sock.close()

        selector.register(server, selectors.EVENT_READ)
        while len(proven) < world_size - 1:
            now = time.monotonic()
            if now > end:
                missing = [str(rank) for rank in range(1, world_size) if rank not in proven]
                raise TimeoutError(f"rank {', '.join(missing)} did not connect to rank 0 in time")
            for ready, _ in selector.select(_POLL_SECONDS):
                sock = ready.fileobj
                assert isinstance(sock, socket.socket)
                if sock is server:
                    for new, address in _accept(server):
                        pending[new] = _Pending(address, now + HANDSHAKE_SECONDS, secrets.token_bytes(_RANDOM_BYTES))
                        selector.register(new, selectors.EVENT_READ)
                        with suppress(OSError):  # a connection that is closed already can be read
                            new.send(pending[new].challenge)
                        if len(pending) > MOST_PENDING and (surplus := _least_wanted(pending)) is not None:
                            drop(surplus)
                    time.sleep(_PAUSE_SECONDS)
                elif sock in pending:  # it may have been dropped just now
                    rank = _read_rank(sock, pending[sock], key)
                    if rank is not None and 0 < rank < world_size:
                        del pending[sock]
                        selector.unregister(sock)
                        if rank in proven:  # it gave its earlier attempt up
                            proven[rank].close()
                        proven[rank] = sock
                    elif rank is not None:
                        drop(sock)
            for sock in [sock for sock, waiting in pending.items() if waiting.end < now]:
                drop(sock)
    for sock in pending:
        sock.close()
    return [proven[rank] for rank in sorted(proven)]


def _accept(server: socket.socket) -> list[tuple[socket.socket, str]]:
    """Return new connections, at most `_ACCEPTED_AT_ONCE`, with their addresses."""
    accepted = []
    for _ in range(_ACCEPTED_AT_ONCE):
        try:
            sock, address = server.accept()
        except OSError:  # there are no more, it is closed again, or there are no descriptors left
            break
        sock.setblocking(False)
        with suppress(OSError):
            keep_alive(sock)
        accepted.append((sock, str(address[0])))
    return accepted


def _least_wanted(pending: dict[socket.socket, _Pending]) -> socket.socket | None:
    """Return the oldest unproven connection of the address that has most of them: a flood drops its own connections.

    None if no more than `MOST_PENDING` are unproven.
    """
    unproven = {sock: waiting.address for sock, waiting in pending.items() if waiting.rank is None}
    if len(unproven) <= MOST_PENDING:
        return None
    ((most, _),) = Counter(unproven.values()).most_common(1)
    return next(sock for sock, address in unproven.items() if address == most)


def _read_rank(sock: socket.socket, waiting: _Pending, key: bytes) -> int | None:
    """Return the rank that a connection has proven and confirmed to be; -1 for a stranger, None until all has come."""
    try:
        if waiting.rank is not None:
            return waiting.rank if sock.recv(1) else -1
        part = sock.recv(_INTRODUCTION_BYTES - len(waiting.received))
        waiting.received += part
        if part and len(waiting.received) < _INTRODUCTION_BYTES:
            return None
        claim, proof = bytes(waiting.received[: _CLAIM.size]), bytes(waiting.received[_CLAIM.size :])
        if not hmac.compare_digest(proof, _proof("rank", key, waiting.challenge, claim)):
            return -1
        sock.send(_proof("rank 0", key, waiting.challenge, claim))
    except BlockingIOError:
        return None
    except OSError:
        return -1
    waiting.rank, waiting.end = int(_CLAIM.unpack(claim)[0]), math.inf  # from here on its kernel says when it is gone
    return None


def _proof(role: str, key: bytes, challenge: bytes, claim: bytes) -> bytes:
    return hmac.digest(key, role.encode() + challenge + claim, "sha256")


def connect(address: tuple[str, int], key: bytes, rank: int, end: float) -> socket.socket:
    """Return a connection to rank 0 that is proven from both sides, retried until `end` of the monotonic clock.

    Raises:
        OSError: there was none by then.
    """
    while True:
        sock = None
        try:
            attempt_end = min(end, time.monotonic() + HANDSHAKE_SECONDS)
            sock = socket.create_connection(address, timeout=HANDSHAKE_SECONDS)
            keep_alive(sock)
            challenge = _receive(sock, _RANDOM_BYTES, attempt_end)
            claim = _CLAIM.pack(rank, secrets.token_bytes(_RANDOM_BYTES))
            sock.sendall(claim + _proof("rank", key, challenge, claim))
            if not hmac.compare_digest(
                _receive(sock, _PROOF_BYTES, attempt_end), _proof("rank 0", key, challenge, claim)
            ):
                raise ConnectionError(f"{address[0]}:{address[1]} is not rank 0 of this run")
            sock.sendall(_CONFIRMATION)
            sock.settimeout(None)
            return sock
        except OSError:
            if sock is not None:
                sock.close()
            if time.monotonic() >= end:
                raise
            time.sleep(0.05 + secrets.randbelow(200) / 1000)


def _receive(sock: socket.socket, number: int, end: float) -> bytes:
    """Return the next `number` bytes, which must arrive by `end` of the monotonic clock."""
    received = bytearray()
    while len(received) < number:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError("no answer in time")
        sock.settimeout(left)
        part = sock.recv(number - len(received))
        if not part:
            raise ConnectionResetError("it was closed")
        received += part
    return bytes(received)


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel send at once what is written, and end the connection when the other host does not answer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("IDLE", IDLE_SECONDS), ("INTVL", PROBE_SECONDS), ("CNT", PROBES)):
        if hasattr(socket, f"TCP_KEEP{option}"):  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{option}"), value)
