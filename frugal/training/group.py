"""How ranks come together."""

import os
import socket
import sys
import threading
import time

import psutil  # type: ignore[import-untyped]  # has no types

from frugal.errors import RequestError

STARTER = "FRUGAL_STARTER_PID"


def form() -> None:
    """Enter the process group that a launcher describes, or one of this process alone; if in one, stay. Collective.

    Without DeepSpeed's shared-memory kernel for CPU ranks, which costs more than it saves: it is compiled when first
    used, a process killed while loading it leaves a lock that later runs wait on for ever, and its buffers (66 MiB a
    rank) stay in /dev/shm after the run. gloo does the same sums.

    Raises:
        RequestError: the port where ranks meet is taken.
    """
    import deepspeed  # seconds, and a parent that only needs `free_port` is not to wait for it
    from torch.distributed import DistNetworkError

    alone = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": os.environ.get("LOCAL_WORLD_SIZE", "1"),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    # Not `deepspeed.comm.torch.build_shm_op`: that attribute is torch itself.
    setattr(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)  # noqa: B010  # unknown to mypy
    try:
        deepspeed.init_distributed(auto_mpi_discovery=False)
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise RequestError(
            f"port {os.environ['MASTER_PORT']} is in use", hint="choose another port for the ranks to meet at"
        ) from None


def end_with_starter() -> None:
    """End this rank soon after the command that started it has vanished, killed without a word.

    `frugal train` names itself in the environment, which only ranks of its own machine get to see. Started by another
    launcher, this does nothing.
    """
    starter = os.environ.get(STARTER)
    if starter is None:
        return

    def watch() -> None:
        while psutil.pid_exists(int(starter)):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="starter", daemon=True).start()


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
