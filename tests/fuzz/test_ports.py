"""Whatever comes to whichever port of a run, from whoever does not know its secret: the run goes on, and is right."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from bench.ranks import free_port
from bench.runs import environment, prepared, records
from tests import forked
from tests.fuzz.packets import attack

LISTENING = "0A"  # TCP_LISTEN of the kernel


def start(number: int, port: int, folder: Path, out: str) -> subprocess.Popen[bytes]:
    """A rank of a run on two, as `frugal train` starts it."""
    of_rank = {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FRUGAL_SECRET": "known to the ranks alone",
    }  # fmt: skip
    words = [
        sys.executable, "-m", "frugal.engine.run", "--plan", "plan2.json", "--data", "text.jsonl", "--steps", "2",
        "--save-every", "0", "--eval-every", "0", "--out", out,
    ]  # fmt: skip
    with (folder / f"{out}-{number}").open("wb") as said:
        return forked.popen(words, cwd=folder, env=environment(folder) | of_rank, stdout=said, stderr=said)


def listening(process: subprocess.Popen[bytes]) -> set[int]:
    """Return the ports at which a rank listens, without gloo's: a process that connects there until a group is formed
    can take a rank's place (`frugal.distributed.connections.listeners`). Only gloo's sockets are not closed by exec."""
    inodes = set()
    with suppress(OSError):  # it has ended
        for path in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                flags = Path(f"/proc/{process.pid}/fdinfo/{path.name}").read_text().split()[3]
                if int(flags, 8) & os.O_CLOEXEC:
                    inodes.add(str(path.readlink()).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    return {int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == LISTENING and words[9] in inodes}


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if record["event"] == "step"]


def said(folder: Path, out: str) -> str:
    return "".join((folder / f"{out}-{number}").read_text() for number in range(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, text, a plan, and what a run on two ranks gives that nobody attacks."""
    folder = prepared(tmp_path_factory.mktemp("ports"), 2)
    port = free_port()
    ranks = [start(number, port, folder, "undisturbed") for number in range(2)]
    assert [each.wait(300) for each in ranks] == [0, 0], said(folder, "undisturbed")
    return folder


@pytest.mark.parametrize("number", [100, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_a_run_whose_ports_are_attacked_is_the_undisturbed_one(number: int, folder: Path) -> None:
    """Rank 0 waits for rank 1, which starts once the port where they meet has had all its packets, and stands still
    while a port that is open for a moment has its own: votes have one."""
    port, out, taken, is_long = free_port(), f"attacked-{number}", Counter[int](), number > 100
    ranks = [start(0, port, folder, out)]
    end = time.monotonic() + 300
    while port not in listening(ranks[0]):
        assert ranks[0].poll() is None and time.monotonic() < end, (folder / f"{out}-0").read_text()
        time.sleep(0.01)
    taken[port] = attack(port, number)
    assert taken[port] == number, (folder / f"{out}-0").read_text()
    ranks.append(start(1, port, folder, out))
    while any(each.poll() is None for each in ranks):
        ranks[1].send_signal(signal.SIGSTOP)
        for new in listening(ranks[0]) - set(taken):
            taken[new] = attack(new, number, seed=new)
        ranks[1].send_signal(signal.SIGCONT)
        time.sleep(0.003 if is_long and len(taken) == 1 else 0.03)
    print(f"packets taken by port: {dict(taken)}; the first is where ranks meet")
    assert [each.returncode for each in ranks] == [0, 0], said(folder, out)
    assert losses(folder / out) == losses(folder / "undisturbed")
