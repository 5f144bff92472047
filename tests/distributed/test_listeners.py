"""Nobody connects to the ports of gloo and of the store once a group is formed."""

import contextlib
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.ranks import Ranks
from frugal.distributed.connections import listeners
from frugal.distributed.connections.listeners import closed_afterwards


def test_what_began_to_listen_inside_is_closed_and_what_was_there_before_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        with closed_afterwards():
            inside = socket.create_server(("127.0.0.1", 0))
            held = socket.create_connection(inside.getsockname(), timeout=10)
        with inside, held, inside.accept()[0] as accepted:
            held.sendall(b"x")
            assert accepted.recv(1) == b"x", "what was connected stays so"
            with pytest.raises(TimeoutError):
                socket.create_connection(inside.getsockname(), timeout=0.5)
        socket.create_connection(before.getsockname(), timeout=10).close()


def open_ports_after_groups() -> list[str]:
    """Return the ports of this rank to which a connection can be made; runs on ranks."""
    with closed_afterwards():
        group = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1), group=group)
    ports = []
    for number in listeners._listening():
        with socket.socket(fileno=os.dup(number)) as listener:
            name = listener.getsockname()
        with contextlib.suppress(TimeoutError):
            socket.create_connection(name[:2], timeout=0.5).close()
            ports.append(name)
    dist.barrier()
    return [str(name) for name in ports] + ([] if Path("/proc/self/fd").exists() else ["not asked"])


def test_no_port_is_open_in_a_formed_group(two_ranks: Ranks) -> None:
    assert two_ranks.run(open_ports_after_groups) == [[], []]
