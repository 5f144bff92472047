"""A process of `bench/gpu/truth.py`, seen from outside."""

import os
import select
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from bench.gpu.worker import EMULATED, Answer, Constants, Run
from frugal.config.hardware.cluster import DeviceKind

ROOT = Path(__file__).parents[2]
EXPANDABLE = "expandable_segments:True"


class Traits(NamedTuple):
    """Properties of a process that are fixed when it starts.

    Attributes:
        is_zero3: whether it runs ZeRO-3, which leaves patches in torch.
        expandable: whether segments are expandable.
        world_size: of the process group that it is in.
        card: the emulated card; None: a real device.
    """

    is_zero3: bool = False
    expandable: bool = False
    world_size: int = 1
    card: str | None = None


class Process:
    """`python -m bench.gpu.worker`."""

    def __init__(self, kind: DeviceKind, traits: Traits) -> None:
        self.traits = traits
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_PORT")}
        if traits.card is not None:
            environment[EMULATED] = traits.card
        if traits.expandable:
            environment |= {"PYTORCH_ALLOC_CONF": EXPANDABLE, "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.worker", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            cwd=ROOT,
        )

    def ask(self, question: Constants | Run, *, seconds: float) -> Answer:
        """Return what came of it; a failure if the process died or took longer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return Answer(failure=self._last_words(), clean=False)
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            return Answer(failure="time was up", clean=False)
        line = self._process.stdout.readline()
        return msgspec.json.decode(line, type=Answer) if line else Answer(failure=self._last_words(), clean=False)

    def end(self) -> None:
        """Kill it: at the end of a process torch and CUDA take a second to clear up what nobody needs."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"the process ended with {self._process.returncode}: {lines[-1] if lines else 'no word'}"
