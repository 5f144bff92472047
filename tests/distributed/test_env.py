"""Every launcher's words become torch's; a rank finds its place on its node, and the network that leads to rank 0."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from deepspeed.utils.logging import LoggerFactory

from bench.plans import plan_by_hand
from frugal.config.schema import understand
from frugal.distributed import env
from frugal.errors import RequestError
from frugal.planning.plan import Plan


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that no launcher has touched, put back afterwards."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
             "CROSS_RANK", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")  # fmt: skip
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


LAUNCHERS = {
    "OpenMPI": {
        "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "MPICH": {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    "SLURM": {
        "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_that_numbers_processes_is_understood(name: str, bare: pytest.MonkeyPatch) -> None:
    for variable, value in (LAUNCHERS[name] | {"MASTER_ADDR": "node0"}).items():
        bare.setenv(variable, value)
    env.adopt_launcher_variables()
    variables = [os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_PORT")]
    assert variables == ["3", "4", "1", "2", "29500"]


PLACE = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip
HINT = "\n\nhint: leave it to the launcher (frugal train, torchrun, deepspeed, srun, mpirun), or: unset "


def refusal(variables: dict[str, str], bare: pytest.MonkeyPatch) -> str:
    """Return what is said of these variables."""
    for name, value in variables.items():
        bare.setenv(name, value)
    with pytest.raises(RequestError) as caught:
        env.adopt_launcher_variables()
    return str(caught.value)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["abc", "-1", "\u0661", "9" * 5000])
def test_what_is_no_number_of_a_rank_is_refused_and_can_be_said(
    name: str, value: str, bare: pytest.MonkeyPatch
) -> None:
    text, shown = refusal(PLACE | {name: value}, bare), value if len(value) <= 40 else value[:40] + "..."
    assert text.startswith(f"the environment variable {name} is `{shown}`\n  because it is a number from ")
    assert text.endswith(HINT + name)
    assert env.local_rank() == 0, "it says so itself"
    assert env.rank() in (0, 1)


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("RANK", "2", " is `2`\n  because ranks count from 0, and WORLD_SIZE is 2"),
        ("LOCAL_RANK", "2", " is `2`\n  because a node's ranks count from 0, and this one has 2"),
        ("RANK", None, " is not set\n  because there are 2 ranks, as WORLD_SIZE says, which meet at rank 0's host"),
        ("MASTER_ADDR", "", " is ``\n  because there are 2 ranks, as WORLD_SIZE says, which meet at rank 0's"),
        ("MASTER_ADDR", "n" * 300, f" is `{'n' * 40}...`\n  because no host has such a name: "),
        ("MASTER_ADDR", "n1..lan", " is `n1..lan`\n  because no host has such a name: "),
        ("MASTER_PORT", None, " is not set\n  because there are 2 ranks"),
    ],
)
def test_a_place_that_cannot_be_is_refused(name: str, value: str | None, what: str, bare: pytest.MonkeyPatch) -> None:
    place = {key: told for key, told in (PLACE | {name: value}).items() if told is not None}
    assert refusal(place, bare).startswith(f"the environment variable {name}{what}")


def test_a_launcher_that_does_not_say_where_rank_0_is_is_refused(bare: pytest.MonkeyPatch) -> None:
    text = refusal(LAUNCHERS["OpenMPI"], bare)
    assert text.startswith(
        "MASTER_ADDR is not set\n  because the launcher says that this is rank 3 of 4, and not where"
    )
    assert "hint: export MASTER_ADDR=HOST" in text


def test_a_rank_with_a_wrong_place_ends_with_one_message(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = plan_by_hand(world_size=2, global_batch=2, micro_batch=1, zero_stage=2)
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.convert(msgspec.to_builtins(plan), Plan).sealed().to_json())  # numbers as a file has them
    done = subprocess.run(
        [sys.executable, "-m", "frugal.engine.run", "--plan", path, "--data", "stdlib", "--steps", "1",
         "--out", tmp_path / "run"],
        env=dict(os.environ) | PLACE | {"LOCAL_RANK": "abc"}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "error: the environment variable LOCAL_RANK is `abc`\n  because it is a number from 0 to "
    )
    assert done.stderr.endswith(f"{HINT}LOCAL_RANK\n")


def test_a_batch_script_that_starts_a_run_itself_is_no_task_of_srun(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("SLURM_PROCID", "0")
    bare.setenv("SLURM_NTASKS", "8")
    env.adopt_launcher_variables()
    assert "RANK" not in os.environ


@pytest.mark.parametrize(("rank", "node", "local_rank"), [(0, 0, 0), (1, 1, 0), (2, 1, 1)])
def test_ranks_count_from_0_on_every_node(rank: int, node: int, local_rank: int, bare: pytest.MonkeyPatch) -> None:
    """DeepSpeed's launcher gives ranks 1 and 2 of slots 1 and 2 the local ranks 1 and 0."""
    cluster = plan_by_hand(world_size=3, global_batch=6, micro_batch=2, zero_stage=2).cluster
    one, two = (replace(cluster.nodes[0], devices=cluster.devices[:number]) for number in (1, 2))
    bare.setenv("RANK", str(rank))
    bare.setenv("CROSS_RANK", str(node))
    bare.setenv("LOCAL_RANK", str(rank % (1, 2)[node]))
    env.correct_local_rank(replace(cluster, nodes=(one, two)))
    assert os.environ["LOCAL_RANK"] == str(local_rank)


def test_ranks_of_one_host_use_its_loopback_and_those_of_several_the_network(bare: pytest.MonkeyPatch) -> None:
    for name, value in (("MASTER_ADDR", "198.51.100.1"), ("WORLD_SIZE", "2"), ("LOCAL_SIZE", "2")):
        bare.setenv(name, value)
    env.choose_interfaces()
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    bare.setenv("LOCAL_SIZE", "1")
    env.choose_interfaces()
    others = {name for _, name in socket.if_nameindex()} - {"lo"}
    assert os.environ["GLOO_SOCKET_IFNAME"] in others | {"lo"}  # a machine with nothing but loopback


def test_a_rank_has_the_segments_that_were_planned_before_torch_uses_a_gpu(
    bare: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpus = understand({"gpus": 1, "mem": "12G"})[1]
    bare.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:False")
    env.adopt_segments(gpus, True)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:512,expandable_segments:True"
    assert [record.message[:50] for record in caplog.records] == [
        "PYTORCH_ALLOC_CONF says expandable_segments:False,", "PYTORCH_ALLOC_CONF has max_split_size_mb:512, whic"
    ]  # fmt: skip
    caplog.clear()
    env.adopt_segments(gpus, True)
    assert not caplog.records, "it has them"


def test_torch_is_told_of_the_segments_where_it_uses_a_gpu_already(bare: pytest.MonkeyPatch) -> None:
    bare.delenv("PYTORCH_ALLOC_CONF", raising=False)
    bare.setattr("torch.cuda.is_initialized", lambda: True)
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        env.adopt_segments(understand({"gpus": 1, "mem": "12G"})[1], True)
        assert torch._C._accelerator_getAllocatorSettings() == "expandable_segments:True"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
        os.environ.pop("PYTORCH_ALLOC_CONF", None)


def test_deepspeed_prints_nothing_where_answers_are_printed_also_if_it_is_imported_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`frugal plan --data ... --json` on a machine without a GPU: DeepSpeed warns that it chose the CPU."""
    env.silence_libraries()
    logger = LoggerFactory.create_logger("DeepSpeed")  # as its import does
    logger.warning("chose the CPU")
    logger.removeHandler(logger.handlers[-1])
    assert capsys.readouterr() == ("", "")
