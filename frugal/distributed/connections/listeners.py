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
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
    for number, inode in _listening().items():
        if inode not in before:
            _close_to_new(number)


def _listening() -> dict[int, int]:
    """Return descriptors and inodes of this process's sockets that listen to a network."""
    inodes = {}
    for path in Path("/proc/self/fd").iterdir():
        number = int(path.name)
        with suppress(OSError):  # it is closed by now
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as sock:
                is_network = sock.family in (socket.AF_INET, socket.AF_INET6)
                if is_network and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    inodes[number] = os.fstat(number).st_ino
    return inodes


def _close_to_new(number: int) -> None:
    """Have the kernel drop what arrives for a listening socket, not for connections that it has made already."""
    program = ctypes.create_string_buffer(_DROP_ALL)
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as sock:  # a sandbox may know no filters
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
