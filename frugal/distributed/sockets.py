"""TCP connections from all ranks to rank 0, beside those of gloo and NCCL: a server, and who may connect to it."""

import json
import os
import resource
import secrets
import socket
from contextlib import suppress
from typing import Any

HANDSHAKE_SECONDS = 10.0


def server(world_size: int) -> socket.socket:
    """A port for all ranks, on all interfaces, in the family of rank 0's address."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4 * world_size + 1024 and hard > soft:  # these connections, the store's, gloo's or NCCL's of each rank
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    family = socket.getaddrinfo(os.environ["MASTER_ADDR"], None)[0][0]
    return socket.create_server(("", 0), family=family, backlog=world_size)


def connected(port: int, secret: str, *card: Any) -> socket.socket:
    """A connection to rank 0, which is told the secret and the `card`. Its timeout is `HANDSHAKE_SECONDS`."""
    sock = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=HANDSHAKE_SECONDS)
    sock.sendall(json.dumps([secret, *card]).encode() + b"\n")
    return sock


def accepted(server: socket.socket, secret: str) -> tuple[socket.socket, list[Any]] | None:
    """A rank's connection and card; that of somebody who does not know the secret is dropped, which closes it."""
    with suppress(OSError, ValueError, TypeError):
        sock, _ = server.accept()
        sock.settimeout(HANDSHAKE_SECONDS)
        said, *card = json.loads(_line(sock))
        if secrets.compare_digest(said, secret):
            return sock, card
    return None


def _line(sock: socket.socket) -> bytes:
    """What comes before the first line end, up to a size that nobody honest needs."""
    found = b""
    while not found.endswith(b"\n") and len(found) < 1000:
        more = sock.recv(1)
        if not more:
            break
        found += more
    return found
