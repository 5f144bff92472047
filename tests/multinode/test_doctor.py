"""`frugal doctor` without ssh: started on each host as it prints, or by srun, it reports of all."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

import pytest

from bench.reliability.hosts import Hosts, environment, plan, start
from frugal.config.hardware import local_host
from tests.multinode.conftest import frugal
from tests.multinode.test_slurm import Slurm, slurm  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def lines(hosts: Hosts) -> list[str]:
    """The line to run on each host."""
    words = ("--hostfile", plan(hosts, 1, 1).with_name("hosts"), "--device", "cpu", "--out", "run")
    code, printed, errors = frugal(hosts, "doctor", *words, "--print")
    assert (code, errors) == (0, "")
    assert printed.splitlines()[1::2] == [f"# {name}" for name in hosts.names]
    return printed.splitlines()[2::2]


def reported(hosts: Hosts, lines: Sequence[str], on_second: str = "") -> tuple[list[int], dict[str, Any], str]:
    """Run a line on each host, `on_second` before the second's; exit codes, the first one's report, what was said."""
    (hosts.folder / "secret").touch(mode=0o600)
    (hosts.folder / "secret").write_text("known to all hosts, and to nobody else")
    given = environment(hosts) | {"FRUGAL_SECRET_FILE": str(hosts.folder / "secret")}
    before = " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
    started = [
        start(hosts, name, "unshare", "--mount", "sh", "-c", f"export {before}\n{more}\n{line} --json")
        for name, line, more in zip(hosts.names, lines, ("", on_second), strict=False)
    ]
    said = [each.communicate(timeout=200) for each in started]
    assert [output for output, _ in said[1:]] == [""] * (len(said) - 1)
    return [each.returncode for each in started], json.loads(said[0][0]), "".join(errors for _, errors in said)


def test_the_printed_lines_are_one_report_of_all_hosts(hosts: Hosts, lines: list[str]) -> None:
    codes, report, errors = reported(hosts, lines)
    assert (codes, report["problems"], errors) == ([0, 0], [], "")
    assert list(report["hosts"]) == hosts.names
    for name, host in report["hosts"].items():
        assert host["versions"] == local_host.versions()
        assert host["networks"]["eth0"] == [f"{hosts.address(name)}/24"]


@pytest.mark.exhaustive  # tests/launch/test_hosts.py has what differs in reports, and the test above how they come
@pytest.mark.parametrize(
    ("on_second", "problem"),
    [
        (
            "mount -t tmpfs none run",
            "n2 does not see {folder}/run as this machine does: the run's folder must be shared",
        ),
        ("export PYTHONPATH={folder}/other:$PYTHONPATH", "n2 has transformers 9.9.9; n1, this machine, has "),
    ],
)
def test_a_host_that_differs_is_named(hosts: Hosts, lines: list[str], on_second: str, problem: str) -> None:
    metadata = hosts.folder / "other" / "transformers-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9.9\n")
    (hosts.folder / "run").mkdir(exist_ok=True)
    codes, report, _ = reported(hosts, lines, on_second.format(folder=hosts.folder))
    assert codes == [2, 0]
    (said,) = report["problems"]
    assert said.startswith(problem.format(folder=hosts.folder))


def test_a_host_that_does_not_come_is_named(hosts: Hosts, lines: list[str]) -> None:
    shorter = (
        "from frugal.launch import host_report as asked; asked.ASK_SECONDS = 2; from frugal.cli import main; main()"
    )
    line = lines[0].replace("-m frugal", f"-c {shlex.quote(shorter)}")
    codes, report, _ = reported(hosts, [line])
    assert codes == [2]
    assert report["problems"] == ["rank 1 did not come within 2 s: was the command started there?"]


@pytest.mark.exhaustive  # the same as above by SLURM's variables
def test_srun_runs_it_on_each_node(hosts: Hosts, slurm: Slurm) -> None:  # noqa: F811 - as above
    words = "python -m frugal doctor --device cpu --out run --json"
    script = hosts.folder / "doctor.sh"
    script.write_text(f"#!/bin/sh\n#SBATCH --nodes=2\nMASTER_ADDR=n1 srun --ntasks-per-node 1 {words}\n")
    log = hosts.folder / "doctor.log"
    given = {"FRUGAL_SECRET_FILE": str(hosts.folder / "secret")}
    job = slurm.submit("--output", log, script, given=given)
    assert slurm.wait(job) == "COMPLETED", log.read_text()
    report = json.loads(log.read_text())
    assert (sorted(report["hosts"]), report["problems"]) == (hosts.names, [])
