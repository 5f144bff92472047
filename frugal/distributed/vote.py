"""What all ranks decide together: a vote on one question, which says what the vote is for.

Each rank sends beside its answer a number for what it is about to do. Where these differ, ranks would go on to other
collectives than each other, or mix tensors in one: nobody goes on.

Votes go over TCP connections from all ranks to rank 0, beside those of gloo and NCCL, through a gate that lets in who
knows the run's secret and is closed once all ranks are in.

gloo takes a byte through two threads on each rank and around a ring of all; nearly all of its time is threads waking
each other. Here every rank sends its byte to rank 0 and waits for the answer, on a connection of its own and in the
thread that asks. On two cores, `python -m bench.reliability.guard`: 0.07 instead of 0.35 ms for 2 ranks, 0.09 instead
of 1.0 ms for 4, 0.14 instead of 3.4 ms for 8. In the midst of a step it is 0.2 ms for 2, because who waits sleeps.

Left out: a tree. Rank 0 reads and writes once for each other rank, which must show with hundreds of them.
"""

import secrets
import socket
import struct
from contextlib import suppress
from queue import SimpleQueue

import torch
import torch.distributed as dist

from frugal.deepspeed_adapter.collectives import timeout_seconds
from frugal.distributed.connections import gate, handshake, secret
from frugal.distributed.connections.gate import Gate
from frugal.distributed.exchange import from_rank_0, gather

CONNECT_SECONDS = 10.0
"""For a rank to reach rank 0; after it all ranks use gloo."""

_VOTE = struct.Struct("<?Q")
_NO, _YES, _DIFFERENT = b"\0", b"\1", b"\2"


class DifferentError(Exception):
    """No rank said yes, but ranks are about to do different things; raised on all of them."""


class Vote:
    """Connections of all ranks to rank 0. Making one is collective, and so is each of its questions.

    `group` is a gloo group of all ranks; where one of them does not reach rank 0, the questions go over that.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        is_dry_run = dist.get_backend(group) == "fake"
        is_alone = is_dry_run or dist.get_world_size(group) == 1
        self._counts = is_alone or dist.get_rank(group) == 0
        self._peers = [] if is_alone else _connect_to_rank_0(group)

    def any(self, mine: bool, what: int = 0) -> bool:
        """Return whether any rank says yes. `what`, of at most 62 bits, is for what this rank is about to do.

        Raises:
            DifferentError: no rank says yes, and they are about to do different things.
            RuntimeError: a rank is gone, or has not come within DeepSpeed's timeout.
        """
        if self._peers is None:
            vote = torch.tensor([mine, what, -what])
            dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._group)
            is_yes, highest, lowest = vote.tolist()
            answer = _YES if is_yes else _NO if highest == -lowest else _DIFFERENT
        else:
            try:
                answer = self._answer(mine, what, self._peers)
            except OSError as error:
                raise RuntimeError(f"Connection to another rank was lost: {error}") from error
        if answer == _DIFFERENT:
            raise DifferentError
        return answer == _YES

    def _answer(self, mine: bool, what: int, peers: list[socket.socket]) -> bytes:
        own = _VOTE.pack(mine, what)
        if not self._counts:
            _send(own, peers)
            return _receive(peers[0], 1)
        votes = [own, *(_receive(peer, _VOTE.size) for peer in peers)]
        is_yes = any(vote[:1] == _YES for vote in votes)
        answer = _YES if is_yes else _NO if all(vote == own for vote in votes) else _DIFFERENT
        _send(answer, peers)
        return answer

    def close(self) -> None:
        """Close this rank's connections."""
        for peer in self._peers or ():
            peer.close()


def _send(message: bytes, peers: list[socket.socket]) -> None:
    for peer in peers:
        peer.sendall(message)


def _receive(peer: socket.socket, size: int) -> bytes:
    message = peer.recv(size, socket.MSG_WAITALL)
    if len(message) < size:
        raise ConnectionResetError("it was closed")
    return message


def _connect_to_rank_0(group: dist.ProcessGroup | None) -> list[socket.socket] | None:
    """Rank 0's connections to all others, or another's to rank 0; None on every rank where one does not reach it."""
    world_size, rank, port, own = dist.get_world_size(group), dist.get_rank(group), 0, secrets.token_bytes(32)
    server, arrived, peers = None, SimpleQueue[socket.socket](), []
    if rank == 0:
        with suppress(OSError):
            server = gate.listen(0, world_size)
            port, key = server.getsockname()[1], (secret.of_run() or b"") + own
            door = Gate(server, key, world_size, {"vote": lambda sock, _: arrived.put(sock)}, world_size - 1)
            door.open()
    port, only_of_these = from_rank_0((port, own), tuple[int, bytes], group)
    if rank != 0 and port:
        address, key = gate.address_of_rank_0(), (secret.of_run() or b"") + only_of_these
        with suppress(OSError):
            socket.getaddrinfo(address, port)  # a name that nobody has is not tried for long
            peers = [handshake.connect(lambda: (address, port), key, "vote", rank, CONNECT_SECONDS)]
    connected = gather(bool(server or peers), bool, group)
    if server is not None:
        peers = [arrived.get(timeout=CONNECT_SECONDS) for _ in connected[1:]] if all(connected) else []
        door.close()
    if not all(connected):
        return None
    for peer in peers:
        peer.setblocking(True)
        peer.settimeout(timeout_seconds())
    return peers
