"""Jobs of real SLURM on several hosts: the script of launch/, the printed line, nodes that differ, requeued jobs."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.reliability.hosts import Hosts, plan, until
from bench.reliability.slurm import Slurm, why_not
from bench.runs import environment, prepared
from frugal.errors import PlanMismatchError, RequestError
from tests.multinode.conftest import RUN, frugal, losses

SCRIPT = Path(__file__).parents[2] / "launch" / "slurm.sh"


@pytest.fixture(scope="module")
def slurm(hosts: Hosts) -> Iterator[Slurm]:
    """A cluster of two nodes, with a secret for its runs."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    (hosts.folder / "secret").touch(mode=0o600)
    (hosts.folder / "secret").write_text("known to all ranks, and to nobody else")
    up = Slurm(hosts, 1, 2)
    try:
        yield up
    finally:
        up.close()


def submitted(slurm: Slurm, path: Path, out: str, *words: object, nodes: int = 2, options: Sequence[str] = ()) -> str:
    """The number of a job that trains by launch/slurm.sh; its output is in OUT.log of the hosts' folder."""
    log = slurm.hosts.folder / f"{out}.log"
    options = ("--nodes", str(nodes), "--gpus-per-node=0", "--cpus-per-task", "1", "--output", str(log), *options)
    given = {"FRUGAL_SECRET_FILE": str(slurm.hosts.folder / "secret")}
    return slurm.submit(*options, SCRIPT, "--plan", path, *RUN, "--out", out, *words, given=given)


def test_the_script_trains_on_two_nodes_as_on_one(slurm: Slurm, hosts: Hosts, on_one_host: list[float]) -> None:
    job = submitted(slurm, plan(hosts, 1, 1), "job")
    assert slurm.wait(job) == "COMPLETED", (hosts.folder / "job.log").read_text()
    assert losses(hosts.folder / "job") == on_one_host


@pytest.mark.exhaustive
def test_a_job_that_is_asked_to_stop_saves_is_requeued_and_resumes(slurm: Slurm, hosts: Hosts) -> None:
    """The losses of the whole are those of a run that nobody stopped."""
    longer = ("--steps", "60", "--save-every", "0")
    code, _, errors = frugal(hosts, "train", "--plan", plan(hosts, 2), *RUN, *longer, "--out", "long")
    assert (code, errors) == (0, "")
    job, folder = submitted(slurm, plan(hosts, 1, 1), "stopped", *longer), hosts.folder / "stopped"
    until(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) >= 5, 120)
    slurm.said("scancel", "--signal=USR1", job)  # as --signal=USR1@300 does at the end of its time
    until(lambda: slurm.field(job, "Restarts") == "1", 60)
    assert slurm.wait(job, "COMPLETED", "FAILED") == "COMPLETED", (hosts.folder / "stopped.log").read_text()
    said = (hosts.folder / "stopped.log").read_text()
    assert "asked to stop by SIGUSR1" in said and "resuming from" in said
    assert losses(folder) == losses(hosts.folder / "long")


@pytest.mark.exhaustive
def test_a_job_that_lost_a_node_is_requeued_and_resumes(slurm: Slurm, hosts: Hosts) -> None:
    """As SLURM does it: the node is down once slurmd has not answered for SlurmdTimeout, 10 s here."""
    longer = ("--steps", "60", "--save-every", "5")
    job, folder = submitted(slurm, plan(hosts, 1, 1), "lost", *longer), hosts.folder / "lost"
    until(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) >= 11, 120)
    hosts.link("n2", "down")
    try:
        until(lambda: slurm.field(job, "Restarts") == "1", 120)
    finally:
        hosts.link("n2", "up")
    assert slurm.wait(job, "COMPLETED", "FAILED") == "COMPLETED", (hosts.folder / "lost.log").read_text()
    assert "resuming from" in (hosts.folder / "lost.log").read_text()
    code, _, errors = frugal(hosts, "train", "--plan", plan(hosts, 2), *RUN, *longer, "--out", "kept")
    assert (code, errors) == (0, "")
    assert losses(folder) == losses(hosts.folder / "kept")


@pytest.mark.exhaustive
def test_an_array_is_one_run_a_task(slurm: Slurm, hosts: Hosts) -> None:
    path = plan(hosts, 1)
    job = submitted(slurm, path, "array-%a", nodes=1, options=("--array=0-1", "--nodelist=n2"))
    for task in range(2):
        log = hosts.folder / f"array-{task}.log"
        assert slurm.wait(f"{job}_{task}", "COMPLETED", "FAILED") == "COMPLETED", log.read_text()
    code, _, errors = frugal(hosts, "train", "--plan", path, *RUN, "--out", "alone")
    assert (code, errors) == (0, "")
    assert [losses(hosts.folder / f"array-{task}") for task in range(2)] == [losses(hosts.folder / "alone")] * 2


@pytest.mark.exhaustive
def test_the_printed_line_starts_nodes_that_differ(slurm: Slurm, hosts: Hosts) -> None:
    path = plan(hosts, 1, 2, global_batch=6)
    words = ("train", "--plan", path, "--hostfile", path.with_name("hosts"), *RUN, "--out", "unequal")
    code, printed, errors = frugal(hosts, *words, "--print", "slurm")
    assert (code, errors) == (0, "")
    (hosts.folder / "unequal.sh").write_text(f"#!/bin/sh\n#SBATCH --nodes=2\nset -e\n{printed}")
    given = {"FRUGAL_SECRET_FILE": str(hosts.folder / "secret")}
    job = slurm.submit("--output", hosts.folder / "unequal.log", hosts.folder / "unequal.sh", given=given)
    assert slurm.wait(job) == "COMPLETED", (hosts.folder / "unequal.log").read_text()
    code, _, errors = frugal(hosts, "train", "--plan", plan(hosts, 3, global_batch=6), *RUN, "--out", "three")
    assert (code, errors) == (0, "")
    assert losses(hosts.folder / "unequal") == losses(hosts.folder / "three")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "the number of this node is not known"),
        ({"NODE_RANK": "2"}, "NODE_RANK=2 is no node of the plan"),
        ({"NODE_RANK": "1"}, "MASTER_ADDR is not set"),
    ],
)
def test_a_node_that_has_no_place_in_the_plan_is_refused(tmp_path: Path, given: dict[str, str], said: str) -> None:
    two: Any = SimpleNamespace(folder=prepared(tmp_path), names=("n1", "n2"))
    words = [sys.executable, "-m", "frugal.launch.one_node", "--plan", str(plan(two, 1, 1)), *RUN, "--out", "none"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(tmp_path) | given, text=True, capture_output=True)
    assert done.returncode in (RequestError.exit_code, PlanMismatchError.exit_code)
    assert done.stderr.startswith(f"error: {said}\n  because ")
