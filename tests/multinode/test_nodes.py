"""Runs on several hosts, each with its own network, names and processes: every launcher, and what goes wrong."""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import distributions, version
from pathlib import Path

import pytest

from bench.reliability.hosts import Hosts, environment, plan, start
from tests.engine.gradients import bound_of_command
from tests.multinode.conftest import RUN, by_hand, frugal, losses, train

LAUNCH = Path(__file__).parents[2] / "launch"


def test_one_command_trains_on_two_hosts_as_on_one(hosts: Hosts, on_one_host: list[float]) -> None:
    code, output, errors = train(hosts, plan(hosts, 1, 1), "two")
    assert (code, errors) == (0, "")
    assert losses(hosts.folder / "two") == on_one_host
    assert output.splitlines()[-1] == f"model written to {hosts.folder}/two/model"
    assert "n1:" not in output and output.count("model written") == 1, "one stream, rank 0's"
    logs = hosts.folder / "two" / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["rank_0.log", "rank_1.log"]
    assert (logs / "rank_0.log").read_text() == output
    assert not list((hosts.folder / "two").glob(".*")), "nothing of the start is left"
    for name in hosts.names:
        assert not any("frugal" in line for line in hosts.processes(name))


def test_all_that_is_wrong_with_the_hosts_is_said_before_anything_starts(hosts: Hosts) -> None:
    path = plan(hosts, 1, 1, 1)
    path.with_name("hosts").write_text("n1 slots=1\nn7 slots=1\nn2 slots=1\n")
    hosts.run("n2", "mount", "-t", "tmpfs", "tmpfs", path.parent, check=True)  # n2 has another folder under this name
    code, output, errors = train(hosts, path, path.parent / "never")
    assert (code, output) == (2, "")
    assert errors == (
        "error: not all hosts are ready\n"
        "  because n7 does not answer: ssh: Could not resolve hostname n7: Name or service not known\n"
        f"  because n2 does not see {path.parent}/never/checkpoints as this machine does: "
        "the run's folder must be shared by all\n\n"
        "hint: frugal doctor --hostfile HOSTS shows what each host has\n"
    )


@pytest.mark.exhaustive
def test_hosts_with_different_plans_are_named(hosts: Hosts) -> None:
    """Ranks started by hand, one of them with another plan."""
    paths = plan(hosts, 1, 1), plan(hosts, 1, 1, global_batch=4)
    codes, errors = by_hand(hosts, paths, *RUN, "--out", "never")
    assert codes == [4, 4]
    assert re.search(
        r"error: the ranks were given different plans\n"
        r"  because n1 \(rank 0\) holds plan \w{12}\n  because n2 \(rank 1\) holds plan \w{12}\n\n"
        r"hint: give every node the same plan.json\n", errors,
    )  # fmt: skip


@pytest.fixture
def older_on_n2(hosts: Hosts) -> Iterator[None]:
    """On n2 the package's own records, mounted over the installed ones, say that frugal is another version."""
    # A checkout has one more than site-packages, of the same installation; which is read depends on the process.
    records = {
        Path(str(file.locate())).resolve()
        for distribution in distributions(name="frugal-trainer")
        for file in distribution.files or ()
        if file.name in ("METADATA", "PKG-INFO")
    }
    other = hosts.folder / "METADATA"
    for there in records:
        other.write_text(re.sub(r"(?m)^Version: .*$", "Version: 0.0.9", there.read_text(), count=1))
        hosts.run("n2", "mount", "--bind", other, there, check=True)
    yield
    for there in records:
        hosts.run("n2", "umount", there, check=True)


@pytest.mark.exhaustive
def test_a_host_with_another_version_is_named_before_anything_starts(hosts: Hosts, older_on_n2: None) -> None:
    code, output, errors = train(hosts, plan(hosts, 1, 1), "never")
    assert (code, output) == (2, "")
    assert errors == (
        "error: not all hosts are ready\n"
        f"  because n2 has frugal 0.0.9; n1, this machine, has {version('frugal-trainer')}\n\n"
        "hint: frugal doctor --hostfile HOSTS shows what each host has\n"
    )


@pytest.mark.exhaustive
def test_hosts_that_have_nothing_but_ipv6_train_the_same(hosts: Hosts, on_one_host: list[float]) -> None:
    path, hostfile = plan(hosts, 1, 1), hosts.folder / "hosts6"
    hostfile.write_text(f"{hosts.address6('n1')} slots=1\n[{hosts.address6('n2')}] slots=1\n")
    for name in hosts.names:
        hosts.run(name, "ip", "addr", "del", f"{hosts.address(name)}/24", "dev", "eth0", check=True)
    try:
        code, _, errors = frugal(hosts, "train", "--plan", path, "--hostfile", hostfile, *RUN, "--out", "six")
    finally:
        for name in hosts.names:
            hosts.run(name, "ip", "addr", "add", f"{hosts.address(name)}/24", "dev", "eth0", check=True)
    assert (code, errors) == (0, "")
    assert losses(hosts.folder / "six") == on_one_host


@pytest.mark.exhaustive
def test_deepspeeds_own_command_trains_the_same(hosts: Hosts, on_one_host: list[float]) -> None:
    """`deepspeed --hostfile` through pdsh; what the other host needs stands in .deepspeed_env."""
    path = plan(hosts, 1, 1)
    (hosts.folder / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\nHF_HUB_OFFLINE=1\n")
    done = hosts.run(
        "n1", LAUNCH / "deepspeed.sh", path.with_name("hosts"), "--plan", path, *RUN, "--out", "deepspeed",
        env=environment(hosts), text=True, timeout=200,
    )  # fmt: skip
    (hosts.folder / ".deepspeed_env").unlink()
    assert done.returncode == 0, done.stderr
    assert losses(hosts.folder / "deepspeed") == on_one_host


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", ["no-ssh", "torchrun"])
def test_what_is_printed_for_each_node_trains_the_same(hosts: Hosts, on_one_host: list[float], launcher: str) -> None:
    code, output, errors = train(hosts, plan(hosts, 1, 1), launcher, "--print", launcher)
    assert (code, errors) == (0, "")
    where, *rest = output.splitlines()
    assert where.startswith(f"# in {hosts.folder}, ")
    assert rest[::2] == ["# n1", "# n2"]
    ranks = [start(hosts, name, "sh", "-c", line) for name, line in zip(hosts.names, rest[1::2], strict=True)]
    said = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert losses(hosts.folder / launcher) == on_one_host


@pytest.mark.exhaustive
def test_what_is_printed_for_openmpi_trains_the_same(hosts: Hosts, on_one_host: list[float]) -> None:
    if hosts.run("n1", "sh", "-c", "command -v mpirun").returncode:
        pytest.skip("OpenMPI is not installed (.ci/packages)")
    code, output, errors = train(hosts, plan(hosts, 1, 1), "openmpi", "--print", "openmpi")
    assert (code, errors) == (0, "")
    line = output.replace("mpirun ", "mpirun --allow-run-as-root ", 1)
    passed = "-x PYTHONPATH " if "PYTHONPATH" in environment(hosts) else ""
    line = line.replace("-x ", f"-x OMP_NUM_THREADS -x HF_HUB_OFFLINE {passed}-x ", 1)
    done = hosts.run("n1", "sh", "-c", line, env=environment(hosts), text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert losses(hosts.folder / "openmpi") == on_one_host


@pytest.mark.exhaustive
def test_three_hosts_with_different_slots(three_hosts: Hosts) -> None:
    code, _, errors = frugal(three_hosts, "train", "--plan", plan(three_hosts, 4), *RUN, "--out", "one")
    assert (code, errors) == (0, "")
    code, _, errors = train(three_hosts, plan(three_hosts, 1, 2, 1), "three")
    assert (code, errors) == (0, "")
    ours, theirs = losses(three_hosts.folder / "three"), losses(three_hosts.folder / "one")
    assert ours == pytest.approx(theirs, rel=bound_of_command(4, 1e-2))


def test_a_host_that_is_down_is_named(hosts: Hosts) -> None:
    path = plan(hosts, 1, 1)
    hosts.link("n2", "down")
    try:
        code, output, errors = frugal(hosts, "doctor", "--hostfile", path.with_name("hosts"), "--device", "cpu")
    finally:
        hosts.link("n2", "up")
    assert (code, errors) == (2, "")
    assert re.search(r"what would stop a run\n  n2 does not answer: ssh: connect to host n2 port 2222: \S.*\n$", output)


@pytest.mark.exhaustive
def test_doctor_looks_at_each_host(hosts: Hosts) -> None:
    path = plan(hosts, 1, 1)
    code, output, errors = frugal(hosts, "doctor", "--hostfile", path.with_name("hosts"), "--device", "cpu")
    assert (code, errors) == (0, "")
    for name in hosts.names:
        assert re.search(
            rf"^{name}\n  reached    at {hosts.address(name)}\n  versions   python {sys.version.split()[0]}, frugal ",
            output, re.MULTILINE,
        )  # fmt: skip
        assert f"eth0 {hosts.address(name)}/24" in output
    assert output.endswith("all is well\n")
