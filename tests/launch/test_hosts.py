"""Commands that `frugal train` prints for other launchers, and faults in hosts' answers."""

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from bench.plans import plan_by_hand
from frugal import cli
from frugal.config.hardware.build_cluster import parse_hostfile
from frugal.config.hardware.cluster import Cluster, Node
from frugal.config.hardware.local_host import versions
from frugal.errors import RequestError
from frugal.launch import host_report, local
from frugal.launch.host_report import Gpu, HostReport, UnreachableHost
from frugal.planning.plan import Plan
from frugal.units import GIB


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan for two nodes of one and two ranks, and a hostfile for it."""
    plan = plan_by_hand(world_size=3, global_batch=6, micro_batch=2, zero_stage=2)
    device = plan.cluster.devices[0]
    nodes = tuple(Node(devices=(device,) * number) for number in (1, 2))
    plan = dataclasses.replace(plan, cluster=Cluster(nodes=nodes, intra_bandwidth=1e9, inter_bandwidth=1e9))
    sealed = msgspec.convert(msgspec.to_builtins(plan), Plan).sealed()
    (tmp_path / "plan.json").write_bytes(sealed.to_json())
    (tmp_path / "hosts").write_text("a slots=1\nb slots=2\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.run(["train", "--plan", "plan.json", "--data", "my text.jsonl", "--steps", "4", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


WORDS = "frugal.engine.run --plan plan.json --data 'my text.jsonl' --steps 4"


@pytest.mark.parametrize(
    ("launcher", "more", "line"),
    [
        (
            "torchrun", (),
            "DS_ACCELERATOR=cpu GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1 torchrun --nnodes 2 --node-rank 1 "
            f"--nproc-per-node 2 --master-addr a --master-port 29500 -m {WORDS}",
        ),
        (
            "no-ssh", ("--master-port", "7000"),
            "DS_ACCELERATOR=cpu GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1 deepspeed --hostfile hosts --no_ssh "
            f"--node_rank 1 --master_addr a --master_port 7000 --module {WORDS}",
        ),
        (
            "openmpi", (),
            "mpirun --hostfile hosts -n 3 --bind-to none -x DS_ACCELERATOR=cpu -x GLOO_SOCKET_IFNAME=eth1 "
            f"-x NCCL_SOCKET_IFNAME=eth1 -x MASTER_ADDR=a -x MASTER_PORT=29500 {sys.executable} -m {WORDS}",
        ),
    ],
)  # fmt: skip
def test_other_launchers_have_a_line_for_each_node_or_for_all(
    launcher: str,
    more: tuple[str, ...],
    line: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in host_report.NETWORK:
        monkeypatch.setenv(name, "eth1")
    code, output, errors = said(capsys, "--hostfile", "hosts", "--print", launcher, *more)
    assert (code, errors) == (0, "")
    assert output.splitlines()[-1] == line
    assert [line for line in output.splitlines()[1:] if line.startswith("#")] == ["# a", "# b"] * (
        launcher != "openmpi"
    )


def test_other_launchers_are_told_the_segments_beside_the_users_options(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan.read(folder / "plan.json")
    gpus = tuple(
        dataclasses.replace(node, devices=tuple(dataclasses.replace(each, kind="cuda") for each in node.devices))
        for node in plan.cluster.nodes
    )
    plan = dataclasses.replace(
        plan, cluster=dataclasses.replace(plan.cluster, nodes=gpus),
        strategy=dataclasses.replace(plan.strategy, expandable_segments=True),
    )  # fmt: skip
    (folder / "plan.json").write_bytes(plan.sealed().to_json())
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:False")
    code, output, errors = said(capsys, "--hostfile", "hosts", "--print", "torchrun")
    assert code == 0
    start = "PYTORCH_ALLOC_CONF=max_split_size_mb:512,expandable_segments:True torchrun --nnodes 2 --node-rank 0 "
    assert output.splitlines()[2].startswith(start)
    assert errors.startswith("note: PYTORCH_ALLOC_CONF says expandable_segments:False, and the plan was made for True")
    assert host_report.environment()["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:512,expandable_segments:False"


@pytest.mark.parametrize(
    ("words", "code", "because", "hint"),
    [
        ("--print kubernetes", 2, "they have 1, 2 GPUs, and all pods of a Job are", "plan for nodes that are alike"),
        ("--print no-ssh", 2, "this launcher reads there which nodes there are", "--hostfile HOSTS, with a line `NAME"),
        ("--hostfile equal", 4, "for 2 nodes with 1, 2 GPUs, and the hostfile has 2 nodes with 2, 2", "plan for it: "),
    ],
)
def test_nodes_that_a_launcher_or_the_plan_is_not_for_are_refused(
    words: str, code: int, because: str, hint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "equal").write_text("a slots=2\nb slots=2\n")
    found, output, errors = said(capsys, *words.split())
    assert (found, output) == (code, "")
    assert because in errors and f"hint: {hint}" in errors


def report(**values: object) -> HostReport:
    """This machine's, but for some values."""
    return msgspec.structs.replace(host_report.collect(Path(), None, cuda=False), **values)


def test_what_hosts_lack_is_said_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    named = parse_hostfile("a slots=2 # mem=12G host-mem=64G\nb slots=1\nc slots=1\nd slots=1\n")
    good = Gpu("card", 12 * GIB - 200_000_000, 11 * GIB)
    reports = [
        report(gpus=[good, Gpu("small", 8 * GIB, 8 * GIB)], cuda_devices=2, memory_bytes=32 * GIB),
        report(gpus=[], cuda_devices=0),
        UnreachableHost("does not answer: ssh: connect to host c port 22: Connection timed out"),
        report(
            gpus=[good], cuda_devices=1, versions=versions() | {"torch": "2.12.1"}, networks={"ib0": ["10.0.0.1/8"]}
        ),
    ]
    assert host_report.problems(named, reports, "cuda")[:2] == [
        "a has 8.00 GiB on GPU 1 (small), its line says 12.00 GiB",
        "a has 32.00 GiB of host memory, its line says 64.00 GiB",
    ]
    problems = host_report.problems(named, reports, "cuda")
    assert problems[2:] == [
        "b has no GPU that torch can use; CPU ranks take --device cpu",
        "c does not answer: ssh: connect to host c port 22: Connection timed out",
        f"d has torch 2.12.1; {socket.gethostname()}, this machine, has {versions()['torch']}",
    ]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert "d has no network interface eth0 with an address; it has ib0" in host_report.problems(named, reports, "cuda")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,ib0")  # gloo takes several
    problems = host_report.problems(named, reports, "cuda")
    assert "d has no network interface eth0,ib0 with an address; it has ib0" in problems
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0,ib0")
    assert not any(each.startswith("d has no network") for each in host_report.problems(named, reports, "cuda"))


def test_rank_0_is_met_on_the_network_the_others_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at what its name means there, 127.0.1.1 on Debian, nor on a network of containers."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # left by an engine of this process
    first = report(address="127.0.1.1", networks={"docker0": ["172.17.0.1/16"], "eth0": ["10.0.0.1/24"]})
    other = report(address="10.0.0.2", networks={"eth0": ["10.0.0.2/24"]})
    assert host_report.rendezvous_address([first, other]) == "10.0.0.1"
    assert host_report.rendezvous_address([report(address="10.1.0.9", networks={})]) == "10.1.0.9"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "docker0")
    assert host_report.rendezvous_address([first, other]) == "172.17.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "docker0,eth0")
    assert host_report.rendezvous_address([first, other]) == "10.0.0.1"


def test_words_survive_a_shell_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    odd = ["a b", "$HOME", "`id`", "x;y", "'", '"', "*", "100%n", "\\", ""]
    line = host_report.command([sys.executable, "-c", "import sys; print(sys.argv[1:])", *odd])
    done = subprocess.run(["ssh-would-run", "-c", line], executable="/bin/sh", capture_output=True, text=True)
    assert done.stdout == f"{odd}\n", done.stderr


def test_deepspeeds_file_of_variables_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / ".deepspeed_env").write_text('NCCL_IB_DISABLE=1\n\nPLACE="over there"\n')
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    variables = host_report.environment()
    assert variables.items() >= {
        "NCCL_IB_DISABLE": "1", "PLACE": "over there", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
    }.items()  # fmt: skip
    (tmp_path / ".deepspeed_env").write_text("NCCL_IB_DISABLE 1\n")
    with pytest.raises(RequestError, match=r"deepspeed_env, line 1, is no NAME=VALUE\n"):
        host_report.environment()


def test_doctor_says_what_this_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert output.endswith("all is well\n")
    assert f"deepspeed {versions()['deepspeed']}" in output
    assert cli.run(["doctor", "--device", "cpu", "--json"]) == 0
    answer = msgspec.json.decode(capsys.readouterr().out)
    ((_, here),) = answer["hosts"].items()
    assert (answer["problems"], here["versions"]) == ([], versions())


def test_rank_0_listens_at_the_port_that_was_chosen_though_others_want_it() -> None:
    assert local.start_ranks("cpu", 2, "tests.launch.rank_program", ["meet"]) == 0


def test_without_nvidia_smi_the_cards_are_those_that_torch_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # torch finds no card here: its answers are made up
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda number: ((10 + number) * GIB, 16 * GIB))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(name="NVIDIA T4"))
    assert cli.run(["doctor", "--out", str(tmp_path)]) == 0
    said = "GPUs       2 x NVIDIA T4 with 16.00 GiB, free 10.00 GiB, 11.00 GiB; torch can use 2\n"
    assert said in capsys.readouterr().out


def test_a_driver_that_does_not_work_leaves_no_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_number: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: no kernel image")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", fails)
    assert host_report.collect(tmp_path, None, cuda=True).gpus == []


def test_keys_of_storages_go_to_all_nodes_and_stand_in_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-the-storage")
    assert host_report.environment()["AWS_SECRET_ACCESS_KEY"] == "a-secret-of-the-storage"
    assert "a-secret-of-the-storage" not in host_report.command(["true"])
