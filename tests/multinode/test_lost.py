"""Runs on several hosts that lose a rank, a host or the network, and the seconds until they end."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.reliability.hosts import Hosts, plan, start
from frugal.distributed.connections.peers import KEEPALIVE_SECONDS

pytestmark = pytest.mark.exhaustive  # half a minute each


@contextmanager
def running(hosts: Hosts, out: str) -> Iterator[subprocess.Popen[str]]:
    """A run on two hosts that would take for ever, at its seventh step."""
    path = plan(hosts, 1, 1)
    process = start(
        hosts, "n1", sys.executable, "-m", "frugal", "train", "--plan", path, "--hostfile", path.with_name("hosts"),
        "--data", "text.jsonl", "--steps", "1000000", "--eval-every", "0", "--out", out,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    try:
        while not process.stdout.readline().startswith("step 1/1000000  loss "):
            assert process.poll() is None, process.stderr.read()
        time.sleep(2)
        yield process
    finally:
        for name in hosts.names:
            hosts.run(name, "pkill", "-KILL", "-f", "frugal")
        process.wait()


def nothing_is_left(hosts: Hosts, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while any("frugal" in line for name in hosts.names for line in hosts.processes(name)):
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def test_a_cut_network_ends_the_run_within_a_minute(hosts: Hosts) -> None:
    with running(hosts, "cut") as process:
        began = time.monotonic()
        hosts.link("n2", "down")
        try:
            _, errors = process.communicate(timeout=KEEPALIVE_SECONDS + 60)
            noticed = time.monotonic() - began
            assert process.returncode != 0
            assert errors.startswith(  # and ssh says that it has no answer
                f"error: rank 1 on n2 is gone\n  because its host has not answered for {KEEPALIVE_SECONDS} s\n"
            )
            assert noticed < KEEPALIVE_SECONDS + 30
            assert nothing_is_left(hosts, seconds=60), "the host that was cut off ends its ranks, too"
            print(f"network cut: noticed after {noticed:.0f} s, all ended after {time.monotonic() - began:.0f} s")
        finally:
            hosts.link("n2", "up")


@pytest.mark.parametrize(("number", "code", "said"), [("TERM", 0, ""), ("INT", 130, "interrupted\n")])
def test_sigterm_saves_the_step_on_all_hosts_and_ctrl_c_interrupts_them(
    number: str, code: int, said: str, hosts: Hosts
) -> None:
    with running(hosts, number) as process:
        hosts.run("n1", "pkill", f"-{number}", "-f", "frugal train", check=True)
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (code, said)
        if number == "TERM":
            saved = (hosts.folder / number / "checkpoints" / "latest").read_text().strip()
            assert f"step {int(saved.removeprefix('step-'))} is saved in {hosts.folder}/TERM/checkpoints" in output
        assert nothing_is_left(hosts)


def test_ranks_end_when_the_command_that_started_them_is_killed(hosts: Hosts) -> None:
    with running(hosts, "orphaned") as process:
        hosts.run("n1", "pkill", "-KILL", "-f", "frugal train", check=True)
        process.wait(timeout=20)
        assert nothing_is_left(hosts, seconds=40)
