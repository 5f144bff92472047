"""Runs on several hosts that are started again: on all of them, or with --elastic on those that are left."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from bench.reliability.hosts import Hosts, plan, start
from tests.engine.gradients import bound_of_command
from tests.multinode.conftest import by_hand, frugal, losses

RUN = ("--data", "text.jsonl", "--steps", "60", "--save-every", "10", "--eval-every", "0")
ON = r"resuming from step-0000[1-6]0\n"


@pytest.fixture(scope="module")
def undisturbed(hosts: Hosts) -> list[float]:
    """The losses of two ranks on one host that nobody disturbs."""
    code, _, errors = frugal(hosts, "train", "--plan", plan(hosts, 2), *RUN, "--out", "undisturbed")
    assert (code, errors) == (0, "")
    return losses(hosts.folder / "undisturbed")


def kill(hosts: Hosts, name: str) -> None:
    """SIGKILL to the rank of a host."""
    hosts.run(name, "pkill", "-KILL", "-f", "[l]ocal_rank=", check=True)


def disturbed(hosts: Hosts, out: str, fault: Callable[[], None], *more: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a run on two hosts, with a fault once twelve steps are done."""
    path, folder = plan(hosts, 1, 1), hosts.folder / out
    process = start(
        hosts, "n1", sys.executable, "-m", "frugal", "train", "--plan", path, "--hostfile", path.with_name("hosts"),
        *RUN, "--out", out, "--max-restarts", "3", *more,
    )  # fmt: skip
    try:
        wait(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) >= 12, process)
        fault()
        output, errors = process.communicate(timeout=240)
    finally:
        process.kill()
        for name in hosts.names:
            hosts.run(name, "pkill", "-KILL", "-f", "frugal")
    return process.returncode, output, errors


def wait(is_true: Callable[[], bool], process: "subprocess.Popen[str] | None" = None) -> None:
    """Until something is so; fails after two minutes, or when the process has ended before."""
    end = time.monotonic() + 120
    while not is_true():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.exhaustive
def test_a_killed_rank_on_another_host_costs_the_steps_since_the_last_checkpoint(
    hosts: Hosts, undisturbed: list[float]
) -> None:
    code, output, errors = disturbed(hosts, "killed", lambda: kill(hosts, "n2"))
    assert code == 0, output + errors
    assert re.fullmatch(
        r"(error: rank 1 on n2 is gone\n  because its connection was closed\n)?"
        rf"restart 1 of 3: (a rank was ended by SIGKILL|rank 1 on n2 is gone) after step \d+; {ON}", errors,
    ), errors  # fmt: skip
    assert losses(hosts.folder / "killed") == undisturbed


def lose(hosts: Hosts, name: str) -> None:
    """A host that has no rank any more and answers nobody."""
    kill(hosts, name)
    hosts.close_to_ssh(name)


LEFT_OUT = (
    r"left out: n2 does not answer: ssh: connect to host n2 port 2222: [^\n]+\n"
    r"1 of 2 hosts are left, with 1 of 2 ranks: planning anew\n"
)


@pytest.mark.exhaustive
def test_elastic_goes_on_with_the_host_that_is_left(hosts: Hosts, undisturbed: list[float]) -> None:
    try:
        code, output, errors = disturbed(hosts, "elastic", lambda: lose(hosts, "n2"), "--elastic")
    finally:
        hosts.open_to_ssh("n2")
    assert code == 0, output + errors
    assert re.search(rf"restart 1 of 3: .* after step \d+; {ON}{LEFT_OUT}", errors), errors
    resumed = r"^resumed at step \d+ of .*elastic: 2 ranks -> 1 rank.*; global batch, order"
    assert re.search(resumed, output, re.MULTILINE), output
    assert losses(hosts.folder / "elastic") == pytest.approx(undisturbed, rel=bound_of_command(60, 1e-2))
    assert json.loads((hosts.folder / "elastic" / "plan.json").read_text())["batch"]["world_size"] == 1


@pytest.mark.exhaustive
def test_elastic_takes_a_host_again_that_is_back(hosts: Hosts, undisturbed: list[float]) -> None:
    def has_rank(name: str) -> bool:
        return any("local_rank=" in line for line in hosts.processes(name))

    def lose_and_come_back() -> None:
        lose(hosts, "n2")
        wait(lambda: not has_rank("n1"))
        wait(lambda: has_rank("n1"))  # the one that goes on alone, before its first step
        hosts.open_to_ssh("n2")
        kill(hosts, "n1")

    try:
        code, output, errors = disturbed(hosts, "back", lose_and_come_back, "--elastic")
    finally:
        hosts.open_to_ssh("n2")
    assert code == 0, output + errors
    assert "all 2 hosts are there again: continuing as first planned\n" in errors
    assert losses(hosts.folder / "back") == pytest.approx(undisturbed, rel=bound_of_command(60, 1e-2))


@pytest.mark.exhaustive
def test_without_elastic_a_host_that_is_away_is_waited_for(hosts: Hosts, undisturbed: list[float]) -> None:
    def lose_for_a_while() -> None:
        lose(hosts, "n2")
        time.sleep(20)
        hosts.open_to_ssh("n2")

    code, output, errors = disturbed(hosts, "away", lose_for_a_while)
    assert code == 0, output + errors
    assert "waiting 5 minutes for n2, which does not answer: ssh: connect to host n2 port 2222: " in errors
    assert losses(hosts.folder / "away") == undisturbed


@pytest.mark.exhaustive
def test_a_network_that_is_away_for_a_moment_is_waited_out(hosts: Hosts, undisturbed: list[float]) -> None:
    """As long as a switch takes to find its way again."""

    def cut_for_a_moment() -> None:
        hosts.link("n2", "down")
        time.sleep(10)
        hosts.link("n2", "up")

    code, output, errors = disturbed(hosts, "moment", cut_for_a_moment)
    assert (code, errors) == (0, ""), output
    assert losses(hosts.folder / "moment") == undisturbed


@pytest.mark.exhaustive
def test_a_checkpoint_that_hosts_do_not_share_is_refused_when_it_is_written(hosts: Hosts) -> None:
    """Ranks started by hand, the second on a host with a disk of its own where the others have the run's folder."""
    path = plan(hosts, 1, 1)
    (hosts.folder / "apart").mkdir()
    hosts.run("n2", "mount", "-t", "tmpfs", "tmpfs", hosts.folder / "apart", check=True)
    codes, errors = by_hand(hosts, [path, path], *RUN, "--out", "apart")
    assert codes == [6, 6]
    folder = hosts.folder / "apart" / "checkpoints"
    assert errors == (
        f"error: cannot write the checkpoint {folder}/step-000010\n"
        f"  because rank 1: {folder}/step-000010.tmp: n2 does not see what rank 0 made, and --out must be shared\n"
        "  because there is no earlier checkpoint\n\n"
        "hint: see to it that it can be written, or choose another folder with --out\n"
    )
