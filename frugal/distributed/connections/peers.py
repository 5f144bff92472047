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

import asyncio
import hmac
import itertools
import os
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

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
T = TypeVar("T")


class PeerPort(msgspec.Struct):
    """A port of rank 0, and the random bytes in the key of its connections."""

    port: int
    nonce: bytes


def connect_ranks(rank: int, world_size: int, share: Callable[[PeerPort], PeerPort]) -> list[socket.socket]:
    """Return rank 0's connections to all other ranks in rank order, or another rank's one to rank 0. Collective.

    `share` sends rank 0's value to all ranks.

    Raises:
        RuntimeError: a rank did not connect within `CONNECT_SECONDS`.
    """
    end = time.monotonic() + CONNECT_SECONDS
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
    family, _, _, _, resolved = socket.getaddrinfo(address_of_rank_0(), port, type=socket.SOCK_STREAM)[0]
    address = str(resolved[0])
    own = {each.address.split("%")[0] for addresses in psutil.net_if_addrs().values() for each in addresses}
    is_loopback = address.startswith("127.") or address == "::1"
    if not env.is_on_one_host() and (address not in own or is_loopback):
        address = ""
    return socket.create_server((address, port), family=family, backlog=1024)


def accept_ranks(server: socket.socket, key: bytes, world_size: int, end: float) -> list[socket.socket]:
    """Return a proven connection from each rank but 0, in rank order, whatever else connects to `server`.

    Raises:
        TimeoutError: some rank has not connected by `end` of the monotonic clock.
    """
    proven: dict[int, socket.socket] = {}
    try:
        _run(_accept_until(end, server, key, world_size, proven))
    except TimeoutError:
        missing = [str(rank) for rank in range(1, world_size) if rank not in proven]
        raise TimeoutError(f"rank {', '.join(missing)} did not connect to rank 0 in time") from None
    return [proven[rank] for rank in sorted(proven)]


async def _accept_until(
    end: float, server: socket.socket, key: bytes, world_size: int, proven: dict[int, socket.socket]
) -> None:
    """Accept connections, each of which proves itself in a task of its own, until `proven` has all ranks."""
    loop, is_complete = asyncio.get_running_loop(), asyncio.Event()
    unproven: dict[socket.socket, tuple[str, asyncio.Task[int]]] = {}  # their addresses; the oldest first

    async def welcome(sock: socket.socket) -> int:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            challenge = secrets.token_bytes(_RANDOM_BYTES)
            await loop.sock_sendall(sock, challenge)
            introduction = await _receive(sock, _INTRODUCTION_BYTES)
            claim, proof = introduction[: _CLAIM.size], introduction[_CLAIM.size :]
            if not hmac.compare_digest(proof, _proof("rank", key, challenge, claim)):
                raise ConnectionError("a stranger")
            del unproven[sock]  # from here on its kernel says when it is gone
            await loop.sock_sendall(sock, _proof("rank 0", key, challenge, claim))
        await _receive(sock, len(_CONFIRMATION))
        return int(_CLAIM.unpack(claim)[0])

    def keep_or_close(sock: socket.socket, ended: asyncio.Task[int]) -> None:
        unproven.pop(sock, None)
        if ended.cancelled() or ended.exception() is not None or not 0 < ended.result() < world_size:
            sock.close()
            return
        if (earlier := proven.get(ended.result())) is not None:  # the rank gave that attempt up
            earlier.close()
        proven[ended.result()] = sock
        if len(proven) == world_size - 1:
            is_complete.set()

    async def accept() -> None:
        for number in itertools.count(1):
            with suppress(OSError):  # it is closed again, or there are no descriptors left
                sock, address = await loop.sock_accept(server)
                task = asyncio.create_task(welcome(sock))
                task.add_done_callback(partial(keep_or_close, sock))
                unproven[sock] = str(address[0]), task
                keep_alive(sock)
            if len(unproven) > MOST_PENDING:
                ((most, _),) = Counter(address for address, _ in unproven.values()).most_common(1)
                oldest = next(sock for sock, (address, _) in unproven.items() if address == most)
                unproven.pop(oldest)[1].cancel()
            if number % _ACCEPTED_AT_ONCE == 0:
                await asyncio.sleep(_PAUSE_SECONDS)

    server.setblocking(False)
    accepting = asyncio.create_task(accept())  # noqa: F841, RUF006  # the loop's end ends it, and what is unproven
    async with asyncio.timeout(end - time.monotonic()):
        await is_complete.wait()


def _proof(role: str, key: bytes, challenge: bytes, claim: bytes) -> bytes:
    return hmac.digest(key, role.encode() + challenge + claim, "sha256")


def connect(address: tuple[str, int], key: bytes, rank: int, end: float) -> socket.socket:
    """Return a connection to rank 0 that is proven from both sides, retried until `end` of the monotonic clock.

    Raises:
        OSError: there was none by then.
    """
    return _run(_connect(address, key, rank, end))


async def _connect(address: tuple[str, int], key: bytes, rank: int, end: float) -> socket.socket:
    loop = asyncio.get_running_loop()
    while True:
        sock = None
        try:
            async with asyncio.timeout(min(HANDSHAKE_SECONDS, end - time.monotonic())):
                sock = socket.create_connection(address, timeout=HANDSHAKE_SECONDS)
                sock.setblocking(False)
                keep_alive(sock)
                challenge = await _receive(sock, _RANDOM_BYTES)
                claim = _CLAIM.pack(rank, secrets.token_bytes(_RANDOM_BYTES))
                await loop.sock_sendall(sock, claim + _proof("rank", key, challenge, claim))
                answer = await _receive(sock, _PROOF_BYTES)
                if not hmac.compare_digest(answer, _proof("rank 0", key, challenge, claim)):
                    raise ConnectionError(f"{address[0]}:{address[1]} is not rank 0 of this run")
                await loop.sock_sendall(sock, _CONFIRMATION)
            sock.setblocking(True)
            return sock
        except OSError as error:
            if sock is not None:
                sock.close()
            if time.monotonic() >= end:
                raise ConnectionError(str(error) or "no answer in time") from None
            await asyncio.sleep(0.05 + secrets.randbelow(200) / 1000)


async def _receive(sock: socket.socket, number: int) -> bytes:
    """Return the next `number` bytes."""
    received = b""
    while len(received) < number:
        part = await asyncio.get_running_loop().sock_recv(sock, number - len(received))
        if not part:
            raise ConnectionResetError("it was closed")
        received += part
    return received


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop of its own, which leaves the process's as it is, also where that runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(work)
    with ThreadPoolExecutor(1) as threads:  # a thread has one loop
        return threads.submit(asyncio.run, work).result()


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel send at once what is written, and end the connection when the other host does not answer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("IDLE", IDLE_SECONDS), ("INTVL", PROBE_SECONDS), ("CNT", PROBES)):
        if hasattr(socket, f"TCP_KEEP{option}"):  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{option}"), value)
