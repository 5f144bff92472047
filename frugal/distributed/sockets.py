"""TCP connections from all ranks to rank 0, beside those of gloo and NCCL; only who knows the secret may connect."""

import json
import os
import resource
import secrets
import socket
from contextlib import suppress
from typing import Any

HANDSHAKE_SECONDS = 10.0
_MOST_HANDSHAKE_BYTES = 1000


def listen(world_size: int) -> socket.socket:
    """A server socket for all ranks, on all interfaces, in the address family of rank 0."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4 * world_size + 1024 and hard > soft:  # these connections, the store's, gloo's or NCCL's of each rank
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    family = socket.getaddrinfo(os.environ["MASTER_ADDR"], None)[0][0]
    return socket.create_server(("", 0), family=family, backlog=world_size)


def connect(port: int, secret: str, *introduction: Any) -> socket.socket:
    """A connection to rank 0, which is sent the secret and who we are. Its timeout is `HANDSHAKE_SECONDS`."""
    sock = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=HANDSHAKE_SECONDS)
    sock.sendall(json.dumps([secret, *introduction]).encode() + b"\n")
    return sock


def accept(server: socket.socket, secret: str) -> tuple[socket.socket, list[Any]] | None:
    """A rank's connection and introduction; None for one without the secret, whose connection is dropped."""
    with suppress(OSError, ValueError, TypeError):
        sock, _ = server.accept()
        sock.settimeout(HANDSHAKE_SECONDS)
        peers_secret, *introduction = json.loads(_read_line(sock))
        if secrets.compare_digest(peers_secret, secret):
            return sock, introduction
    return None


def _read_line(sock: socket.socket) -> bytes:
    """Up to the first line end, byte by byte: what comes after it is not ours to read."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MOST_HANDSHAKE_BYTES:
        byte = sock.recv(1)
        if not byte:
            break
        line += byte
    return line
