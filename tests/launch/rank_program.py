"""Ranks that do one thing, without torch: `rank_program --local_rank=0 meet`."""

import contextlib
import os
import signal
import socket
import sys
import time

from frugal.distributed.connections import peers


def meet() -> None:
    """Listen on rank 0, after another program has tried to have the port. The others only end."""
    port = int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] != "0":
        return
    for address in ("127.0.0.1", ""):
        with socket.socket() as other, contextlib.suppress(OSError):
            other.bind((address, port))
            other.listen()
            sys.exit(f"port {port} was to be had")
    with peers.listen(port) as server:
        assert server.getsockname() == ("127.0.0.1", port)


def end_by(number: int) -> None:
    """Rank 1 is ended by a signal, and rank 0 waits for it."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)
    time.sleep(60 if os.environ["RANK"] == "0" else 0)


if __name__ == "__main__":
    if sys.argv[2] == "meet":
        meet()
    else:
        end_by(signal.SIGRTMIN + int(sys.argv[2]))
