"""The processes of a run: the ranks of this machine, and `python -m frugal.launch.node` for those of another host.

`frugal train` starts the ranks of its own machine itself. On other hosts ssh runs this module, which reads from its
standard input what to start (`Launch`, one line of JSON) and then the numbers of signals to pass on. Every process is
tied to the one that started it by a pipe: through it come signals, and when it closes the process ends. So nothing
outlives the command, however it ends, and nothing secret stands in a command line.

Each process leads a session of its own, so that Ctrl-C reaches it through its parent alone, and its own children are
ended with it.
"""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from types import FrameType

import msgspec

from frugal.distributed import first_failure, parent, stop
from frugal.distributed.process_group import hold_port
from frugal.errors import RequestError
from frugal.imports import python_words

POLL_SECONDS = 0.1

LEAVE_SECONDS = 10.0
"""Time for the others to write their logs once a rank has failed, and for all ranks after a second signal."""

END_SECONDS = 10.0
"""Time for another host to end its ranks before ssh is ended."""


class Launch(msgspec.Struct, kw_only=True):
    """The ranks of one node to start.

    Attributes:
        devices: the numbers or names of each node's devices, one a rank.
        number: this node's.
        address: where all ranks meet.
        port: where all ranks meet; 0: on the only node, any that is free.
        module: the module that every rank runs, with `arguments`.
        environment: of the ranks, besides their places in the run.
    """

    devices: list[list[int | str]]
    number: int = 0
    address: str = "127.0.0.1"
    port: int
    module: str
    arguments: list[str]
    environment: dict[str, str]

    def environments(self) -> list[dict[str, str]]:
        """Return each rank's environment variables for its place: the names that DeepSpeed's launcher sets."""
        own = self.devices[self.number]
        before = sum(map(len, self.devices[: self.number]))
        return [
            {
                "RANK": str(before + local_rank), "LOCAL_RANK": str(local_rank), "LOCAL_SIZE": str(len(own)),
                "LOCAL_WORLD_SIZE": str(len(own)), "WORLD_SIZE": str(sum(map(len, self.devices))),
                "CROSS_RANK": str(self.number), "CROSS_SIZE": str(len(self.devices)), "MASTER_ADDR": self.address,
                "MASTER_PORT": str(self.port), "CUDA_VISIBLE_DEVICES": ",".join(map(str, own)),
            }
            for local_rank in range(len(own))
        ]  # fmt: skip


def run(launch: Launch, *, to_stderr: bool = False, control: io.FileIO | None = None) -> int:
    """Run all ranks of a node until they end; return the exit code of the first that failed, or 0.

    The port where ranks meet is held for rank 0, which listens there seconds later. With `to_stderr` ranks print to
    this process's standard error. `control` brings the numbers of signals; its end ends the ranks.

    Raises:
        RequestError: the port is in use.
        KeyboardInterrupt: a second Ctrl-C.
    """
    with ExitStack() as stack:
        if launch.number == 0:
            held = stack.enter_context(hold_port(launch.address, launch.port))
            launch = msgspec.structs.replace(launch, port=held.getsockname()[1])
        ranks = stack.enter_context(Processes())
        for place in launch.environments():
            command = [*python_words(), "-u", "-m", launch.module, f"--local_rank={place['LOCAL_RANK']}"]
            ranks.start([*command, *launch.arguments], {**launch.environment, **place}, stdout=2 if to_stderr else None)
        if control is not None:
            threading.Thread(target=ranks.obey, args=(control,), name="frugal node", daemon=True).start()
        return ranks.wait()


class Processes:
    """Processes that are started together, signalled, and ended together: inside a `with` block.

    `end_seconds`: how long they may take to end once their pipes are closed, before they are killed.
    """

    def __init__(self, end_seconds: float = 0.0) -> None:
        self._end_seconds = end_seconds
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[int] = []
        self._received = stop.Received()
        self._is_interrupted = False
        self._kill_at: float | None = None
        self._handlers = ExitStack()

    def __enter__(self) -> "Processes":
        self._handlers.enter_context(stop.handled((*stop.SIGNALS, signal.SIGINT), self.pass_on))
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left, with the processes that these started."""
        with self._handlers:
            for pipe in self._pipes:
                os.close(pipe)
            end = time.monotonic() + self._end_seconds
            while time.monotonic() < end and any(process.poll() is None for process in self._processes):
                time.sleep(POLL_SECONDS)
            for process in self._processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], *, stdout: int | None = None,
        first_line: bytes | None = None,
    ) -> None:  # fmt: skip
        """Start a process that reads its pipe by `parent.end_with_parent`, or with `first_line` as standard input."""
        theirs, ours = os.pipe()
        self._pipes.append(ours)
        is_rank = first_line is None
        process = subprocess.Popen(
            command, env={**environment, parent.PIPE: str(theirs)} if is_rank else environment, stdout=stdout,
            stdin=subprocess.DEVNULL if is_rank else theirs, pass_fds=[theirs] if is_rank else [],
            preexec_fn=None if is_rank else _leave_signals_to_parent, start_new_session=True,
        )  # fmt: skip
        self._processes.append(process)
        os.close(theirs)
        if first_line is not None:
            with suppress(OSError), open(ours, "wb", closefd=False) as pipe:  # a descriptor
                pipe.write(first_line + b"\n")

    def pass_on(self, number: int, _frame: FrameType | None = None) -> None:
        """Send a signal to all; one that comes a second time ends them, if they do not end by themselves.

        Raises:
            KeyboardInterrupt: a second Ctrl-C.
        """
        times = self._received.add(number)
        if number == signal.SIGINT:
            if self._is_interrupted:
                raise KeyboardInterrupt
            self._is_interrupted = True
        elif number in stop.SIGNALS:
            stop.note(number)
        if times == 2 or self._is_interrupted:
            self._kill_at = time.monotonic() + LEAVE_SECONDS
        if times:
            self._tell(number)

    def obey(self, control: io.FileIO) -> None:
        """Pass on the signals whose numbers are read from `control`, and end all at its end."""
        while number := control.read(1):
            self.pass_on(number[0])
        self._kill_at = 0.0

    def wait(self) -> int:
        """Return the exit code of the first that failed, or 0, once all have ended."""
        code, left = 0, list(self._processes)
        while left:
            ended = [process.returncode for process in left if process.poll() is not None]
            left = [process for process in left if process.returncode is None]
            if any(ended) and not code:  # 1 is also that of a rank that lost another
                code = max(filter(None, ended), key=lambda each: each != 1)
                self._tell(stop.OTHER_FAILED)
                self._kill_at = time.monotonic() + LEAVE_SECONDS
            if left and self._kill_at is not None and time.monotonic() > self._kill_at:
                return code or 128 + (signal.SIGINT if self._is_interrupted else stop.requested() or signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        return code

    def _tell(self, number: int) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # the process has ended
                os.write(pipe, bytes([number]))


def _leave_signals_to_parent() -> None:
    """Have ssh end with the command, and ignore the signals that the command passes on."""
    parent.set_death_signal(signal.SIGKILL)
    stop.ignore()


def main() -> None:
    """Run the ranks of this host."""
    control = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115  # a buffer's lock would be held at exit
    launch = msgspec.json.decode(control.readline(), type=Launch)
    launch.environment = {**os.environ, **launch.environment}
    try:
        sys.exit(run(launch, control=control))
    except RequestError as error:
        os.environ.update(launch.environment)
        first_failure.report(error.exit_code, f"error: {error}")
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
