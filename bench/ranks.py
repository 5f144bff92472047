"""Real ranks: processes joined by gloo that stay alive from call to call, so that imports are paid once."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


def free_port() -> int:
    """Return a TCP port on loopback that nobody listens on, and that Linux gives to no connection until it is used."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)  # ports of connections begin here
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def forks() -> multiprocessing.context.ForkServerContext:
    """Makes processes that have their imports done: they are forked from one that did them, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    imports = ["deepspeed", "transformers.modeling_utils", "frugal.engine.engine", "frugal.dryrun.run"]
    context.set_forkserver_preload(imports)
    return context


_unfreeze, _NUM_UNFREEZES = gc.unfreeze, itertools.count(1)


def freeze_what_was_imported() -> None:
    """Freeze the objects that there are, for longer than a dry run or a measurement, which unfreezes all at its end.

    To look at a million imported objects takes a collection 0.4 s, and DeepSpeed collects at every start of an engine.
    What was frozen in between is looked at each hundredth time.
    """
    gc.freeze()
    gc.unfreeze = _unfreeze_seldom


def _unfreeze_seldom() -> None:
    if next(_NUM_UNFREEZES) % 100 == 0:
        _unfreeze()
        gc.collect()
        gc.freeze()


class Ranks:
    """`world_size` processes in one process group. `run` calls a module-level function on all of them."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []  # as `started` gives them
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300, **kwargs: Any) -> list[Any]:
        """Return what `function(*args, **kwargs)` returns on each rank, in rank order.

        A rank that raises or does not answer within `timeout` seconds is an error and ends all processes; the
        next call starts new ones.
        """
        if not self._processes:
            self._start()
        try:
            for connection in self._connections:
                connection.send((function, args, kwargs))
        except OSError:
            ended = [each.poll() if hasattr(each, "poll") else each.exitcode for each in self._processes]
            self.close()
            raise AssertionError(f"a rank has died since the call before; exit codes {ended}") from None
        waiting, results = dict(enumerate(self._connections)), dict[int, Any]()
        until = time.monotonic() + timeout
        while waiting:  # whoever answers first: a rank that failed leaves the others waiting for it
            ready = wait(list(waiting.values()), max(0.0, until - time.monotonic()))
            if not ready:
                self.close()
                missing = " and ".join(map(str, waiting))
                raise AssertionError(f"rank {missing} of {self.world_size} did not answer within {timeout} s")
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    ok, value = waiting.pop(rank).recv()
                except (EOFError, ConnectionResetError):
                    ok, value = False, "the process died"
                if not ok:
                    self.close()
                    raise AssertionError(f"rank {rank} of {self.world_size} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in sorted(results)]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = multiprocessing.Pipe()
            self._processes.append(started(rank, self.world_size, port, theirs))
            theirs.close()
            self._connections.append(ours)


def started(*arguments: Any) -> Any:
    """Start the process of a rank: its number, how many there are, a port, and its end of a connection."""
    process = forks().Process(target=_serve, args=arguments, daemon=True)
    process.start()
    return process


def _serve(rank: int, world_size: int, port: int, connection: Connection) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1",
    )  # fmt: skip
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    import torch

    from frugal.distributed import process_group

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    process_group.form()
    while True:
        gc.collect()
        freeze_what_was_imported()
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, function(*args, **kwargs)))
        except Exception:
            connection.send((False, traceback.format_exc()))


if __name__ == "__main__":  # numbers of `_serve`, the descriptor of its connection, and the key of tensors sent there
    *_numbers, _descriptor = map(int, sys.argv[1:-1])
    multiprocessing.current_process().authkey = bytes.fromhex(sys.argv[-1])
    _serve(*_numbers, Connection(_descriptor))
