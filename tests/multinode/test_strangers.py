"""A stranger on the network of a run and a user of its hosts neither end it, nor slow it, nor learn its tokens."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.reliability.hosts import SSH_PORT, Hosts, environment, plan
from tests.multinode import listening, stranger
from tests.multinode.conftest import losses
from tests.multinode.test_lost import nothing_is_left

KILLED = (
    r"(waiting for another process that makes the same tokenised data, .+\n)?"  # where that takes long
    r"error: (rank 1 on n2 is gone\n  because its connection was closed|a rank was ended by SIGKILL\n  because .+)\n"
)
"""The launcher notices it as soon as the peer watch."""
PORT = 29777
TOKEN = "hf_markerOfATokenThatNobodyMaySee"  # it opens nothing


@contextmanager
def program(hosts: Hosts, name: str, *words: object) -> Iterator["subprocess.Popen[str]"]:
    """A program on a host, which is ended at the end of the block."""
    process = subprocess.Popen(
        hosts.inside(name, sys.executable, *words), env=environment(hosts), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        end(hosts, name, process, words)


def end(hosts: Hosts, name: str, process: "subprocess.Popen[str]", words: Sequence[object]) -> None:
    """Have a program on a host end by itself."""
    hosts.run(name, "pkill", "-TERM", "-f", "--", " ".join(map(str, words)))
    process.wait(timeout=60)


@contextmanager
def training(hosts: Hosts, out: str, *more: object) -> Iterator["subprocess.Popen[str]"]:
    """A run on n1 and n2, started on n1 by somebody who has a token."""
    path = plan(hosts, 1, 1)
    process = subprocess.Popen(
        hosts.inside(
            "n1", sys.executable, "-m", "frugal", "train", "--plan", path, "--hostfile", path.with_name("hosts"),
            "--master-port", PORT, "--data", "text.jsonl", "--eval-every", "0", "--out", out,
            *more,
        ),
        env=environment(hosts) | {"HF_TOKEN": TOKEN}, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        for name in ("n1", "n2"):
            hosts.run(name, "pkill", "-KILL", "-f", "frugal")
        process.wait()


def wait_for_steps(folder: Path, number: int, process: "subprocess.Popen[str]", seconds: float = 180) -> float:
    """Seconds until so many steps are logged."""
    start = time.monotonic()
    while not (folder / "metrics.jsonl").exists() or len(losses(folder)) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - start < seconds
        time.sleep(0.1)
    return time.monotonic() - start


def environment_of_rank(hosts: Hosts, name: str) -> str:
    """Return the environment of the rank on a host, as its user can read it."""
    script = "tr '\\0' '\\n' < /proc/$(pgrep -f '[l]ocal_rank=' | head -n 1)/environ"
    return str(hosts.run(name, "sh", "-c", script, text=True, check=True).stdout)


def open_ports(hosts: Hosts, name: str) -> list[int]:
    """Return the ports of a host to which n3 can connect, without its sshd's."""
    listed = hosts.run(name, "ss", "-Hltn", text=True, check=True).stdout.splitlines()
    ports = {int(line.split()[3].rpartition(":")[2]) for line in listed} - {SSH_PORT}
    script = (
        "import socket, sys\n"
        "for port in sys.argv[2:]:\n"
        "    try:\n"
        "        socket.create_connection((sys.argv[1], int(port)), timeout=1).close()\n"
        "        print(port)\n"
        "    except OSError:\n"
        "        pass\n"
    )
    tried = hosts.run("n3", sys.executable, "-c", script, hosts.address(name), *ports, text=True, check=True)
    return [int(line) for line in tried.stdout.split()]


def test_a_stranger_neither_ends_a_run_nor_its_watch_and_no_token_is_seen(three_hosts: Hosts) -> None:
    hosts, folder = three_hosts, three_hosts.folder / "attacked"
    seen = {name: hosts.folder / f"commands-{name}" for name in ("n1", "n2")}
    with ExitStack() as stack:
        watchers = {
            name: stack.enter_context(program(hosts, name, listening.__file__, path)) for name, path in seen.items()
        }
        words = (stranger.__file__, PORT, *map(hosts.address, ("n1", "n2")))
        attack = stack.enter_context(program(hosts, "n3", *words))
        run = stack.enter_context(training(hosts, "attacked", "--steps", "1000000", "--save-every", "0"))
        wait_for_steps(folder, 1, run)
        wait_for_steps(folder, len(losses(folder)) + 8, run)
        assert attack.poll() is None, "the stranger was there before, and still is"
        end(hosts, "n3", attack, words)
        assert [open_ports(hosts, name) for name in ("n1", "n2")] == [[], []]

        environments = [environment_of_rank(hosts, name) for name in ("n1", "n2")]
        assert all(f"HF_TOKEN={TOKEN}\n" in text for text in environments), "the ranks do have it"
        (secret,) = {line for text in environments for line in text.splitlines() if line.startswith("FRUGAL_SECRET=")}
        for name, watcher in watchers.items():
            end(hosts, name, watcher, (listening.__file__,))
        for path in seen.values():
            assert b"frugal.engine.run" in path.read_bytes()
            assert TOKEN.encode() not in path.read_bytes()
            assert secret.partition("=")[2].encode() not in path.read_bytes()
        for path in (path for path in folder.rglob("*") if path.is_file()):
            assert TOKEN.encode() not in path.read_bytes(), path
            assert secret.partition("=")[2].encode() not in path.read_bytes(), path

        hosts.run("n2", "pkill", "-KILL", "-f", "[l]ocal_rank=", check=True)
        _, errors = run.communicate(timeout=120)
        assert re.fullmatch(KILLED, errors), errors
        assert run.returncode != 0
        assert nothing_is_left(hosts)
    assert attack.stdout is not None
    to_rank_0, _ = json.loads(attack.stdout.read())
    assert to_rank_0["connected"] > 0
    assert min(to_rank_0["tried"].get(name, 0) for name in ("pickle", "verdict", "flood")) > 0, to_rank_0
    assert to_rank_0["answers"] == []
    assert not (hosts.folder / "unpickled").exists()
