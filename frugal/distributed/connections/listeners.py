"""Closes the ports at which gloo and the store listen, once all ranks of a group are connected.

gloo accepts every connection, and never stops listening: a stranger could use up a rank's descriptors, or take the
place of a rank in a group that is made later. It needs its port only until a group's ranks are connected, and gives
each group a port of its own; from then on the kernel drops what comes to that port. The same holds for TCPStore.

Left out: the moments until a group is connected; NCCL, which makes connections later, to other ranks and to the store;
and other systems than Linux.
"""

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil  # type: ignore[import-untyped]  # has no types

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # Berkeley packet filter: return 0 bytes


@contextmanager
def closed_afterwards(also: socket.socket | None = None) -> Iterator[None]:
    """Have ports at which this process begins to listen inside the `with` block take no connections after it.

    The same goes for the port of `also`, which listens already.
    """
    if sys.platform != "linux":
        yield
        return
    before = set(_listening().values())
    yield
    if also is not None:
        _close_to_new(also.fileno())
    for number, port in _listening().items():
        if port not in before:
            _close_to_new(number)


def _listening() -> dict[int, int]:
    """Return descriptors and ports of this process's sockets that listen to a network."""
    return {
        each.fd: each.laddr.port
        for each in psutil.Process().net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }


def _close_to_new(number: int) -> None:
    """Have the kernel drop what arrives for a listening socket, not for connections that it has made already."""
    program = ctypes.create_string_buffer(_DROP_ALL)
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as sock:  # a sandbox may know no filters
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
