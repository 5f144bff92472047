"""The ranks of one node: started with their places in the environment, signalled, and ended together.

    python -m frugal.launch.node --devices '[[0, 1], [0, 1]]' --node_rank=1 --master_addr=HOST --master_port=29500
        frugal.training.run --plan plan.json

`frugal train` calls `run` on its own machine, and this module on other hosts. It takes the place of DeepSpeed's
launcher, which kills its ranks half a minute after a SIGTERM, and leaves them running when it is killed itself.

Each rank leads a session of its own, so that Ctrl-C reaches it through us alone, and processes of its own end with it.
"""

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType

from frugal.distributed import first_failure, parent, stop
from frugal.distributed.process_group import hold_port
from frugal.errors import RequestError

POLL_SECONDS = 0.1

PORT_TAKEN = errno.EADDRINUSE
"""Exit code on another host whose port, where ranks were to meet, is in use."""

LEAVE_SECONDS = 10.0
"""For the others to note in their logs what they saw, once a rank has failed, and for all after a second signal."""


@dataclass(frozen=True, kw_only=True)
class LaunchedNode:
    """One of a run's nodes, by its `number`; `devices` has the numbers or names of each node's, one a rank.

    `address` and `port`: where all ranks meet; port 0: on the only node, any that is free.
    """

    devices: Sequence[Sequence[int | str]]
    number: int = 0
    address: str = "127.0.0.1"
    port: int

    def environments(self) -> Iterator[dict[str, str]]:
        """What each of its ranks is told: the same names as DeepSpeed's launcher has."""
        own = self.devices[self.number]
        before = sum(map(len, self.devices[: self.number]))
        for local_rank in range(len(own)):
            yield {
                "RANK": str(before + local_rank), "LOCAL_RANK": str(local_rank), "LOCAL_SIZE": str(len(own)),
                "LOCAL_WORLD_SIZE": str(len(own)),
                "WORLD_SIZE": str(sum(map(len, self.devices))), "CROSS_RANK": str(self.number),
                "CROSS_SIZE": str(len(self.devices)), "MASTER_ADDR": self.address, "MASTER_PORT": str(self.port),
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, own)),
            }  # fmt: skip

    def command(self, module: str, arguments: Sequence[str], *, number: str) -> list[str]:
        """The words that start the ranks of a node on its host; `number`: what stands for the node's."""
        return [
            sys.executable, "-u", "-m", "frugal.launch.node", "--devices", json.dumps(self.devices),
            f"--node_rank={number}", f"--master_addr={self.address}", f"--master_port={self.port}", module,
            *arguments,
        ]  # fmt: skip


def run(
    node: LaunchedNode,
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    to_stderr: bool = False,
) -> int:
    """Run `module` on all ranks of a node until they end; the exit code of the first that failed, or 0.

    Signals to stop are passed on to the ranks, and Ctrl-C is. `to_stderr`: what ranks print goes to our standard error.

    Where ranks meet is held for rank 0, which listens there seconds later, and again where ranks replace themselves.

    Raises:
        RequestError: the port is in use.
        KeyboardInterrupt: a second Ctrl-C.
    """
    if node.number == 0:
        with hold_port(node.address, node.port) as held:
            return _run(replace(node, port=held.getsockname()[1]), module, arguments, environment, to_stderr)
    return _run(node, module, arguments, environment, to_stderr)


def _run(
    node: LaunchedNode, module: str, arguments: Sequence[str], environment: Mapping[str, str], to_stderr: bool
) -> int:
    with _Ranks() as ranks, stop.handled(stop.SIGNALS, ranks.pass_on):
        with stop.handled([signal.SIGINT], ranks.pass_on):  # in the midst of a start it would leave ranks behind
            ranks.start(node, module, arguments, environment, stdout=2 if to_stderr else None)
        while True:
            try:
                return ranks.wait()
            except KeyboardInterrupt:
                if ranks.is_interrupted:
                    raise
                ranks.pass_on(signal.SIGINT)


class _Ranks:
    """The processes of a node's ranks, each with the write end of the pipe that ties it to us."""

    def __init__(self) -> None:
        self.is_interrupted = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[int] = []
        self._received = stop.Received()
        self._kill_at: float | None = None

    def __enter__(self) -> "_Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left, with the processes that ranks started."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in self._pipes:
            os.close(pipe)

    def start(
        self,
        node: LaunchedNode,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int | None,
    ) -> None:
        for place in node.environments():
            theirs, ours = os.pipe()
            self._pipes.append(ours)
            command = [sys.executable, "-u", "-m", module, f"--local_rank={place['LOCAL_RANK']}", *arguments]
            self._processes.append(
                subprocess.Popen(
                    command, env={**environment, **place, parent.PIPE: str(theirs)}, pass_fds=[theirs], stdout=stdout,
                    start_new_session=True,
                )
            )  # fmt: skip
            os.close(theirs)

    def pass_on(self, number: int, _frame: FrameType | None = None) -> None:
        """Tell the ranks of a signal; one that comes a second time ends them, if they do not do so themselves."""
        times = self._received.add(number)
        if number == signal.SIGINT:
            self.is_interrupted = True
        else:
            stop.note(number)
        if times == 2 or self.is_interrupted:
            self._kill_at = time.monotonic() + LEAVE_SECONDS
        if times:
            self._tell(number)

    def wait(self) -> int:
        """The exit code of the first rank that failed, or 0, once all have ended."""
        code, left = 0, list(self._processes)
        while left:
            ended = [process.returncode for process in left if process.poll() is not None]
            left = [process for process in left if process.returncode is None]
            if any(ended) and not code:  # 1 is also that of a rank that lost another
                code = max(filter(None, ended), key=lambda each: each != 1)
                self._tell(stop.OTHER_FAILED)
                self._kill_at = time.monotonic() + LEAVE_SECONDS
            if left and self._kill_at is not None and time.monotonic() > self._kill_at:
                return code or 128 + (signal.SIGINT if self.is_interrupted else stop.requested() or signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        return code

    def _tell(self, number: int) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # the rank has ended
                os.write(pipe, bytes([number]))


def main() -> None:
    """Run the ranks of this host."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=json.loads)
    parser.add_argument("--node_rank", type=int)
    parser.add_argument("--master_addr")
    parser.add_argument("--master_port", type=int)
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    node = LaunchedNode(
        devices=given.devices, number=given.node_rank, address=given.master_addr, port=given.master_port
    )
    try:
        sys.exit(run(node, given.module, given.arguments, os.environ))
    except RequestError as error:  # `frugal train` says so, or chooses another port
        first_failure.report(PORT_TAKEN, f"error: {error}")
        sys.exit(PORT_TAKEN)


if __name__ == "__main__":
    main()
