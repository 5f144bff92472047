"""The commands that start a plan's ranks under other launchers, to copy: one for each node, or one for all."""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from frugal.config.hostfile import HostfileEntry
from frugal.config.run import Settings
from frugal.distributed.env import DEFAULT_PORT
from frugal.errors import RequestError
from frugal.launch.ssh import Access
from frugal.planning.plan import Plan

Launcher = Literal["no-ssh", "deepspeed", "torchrun", "openmpi", "slurm"]

RANK = ["-m", "frugal.training.run"]
"""What every launcher starts, once a rank."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What every launcher is told in its own words.

    `plan_path` is where the ranks find the plan, `hosts` and `hostfile` the nodes, where a hostfile names them; `port`
    where ranks meet.
    """

    plan: Plan
    plan_path: Path
    hosts: Sequence[HostfileEntry]
    hostfile: Path | None
    access: Access
    settings: Settings
    port: int = DEFAULT_PORT

    @property
    def slots(self) -> list[int]:
        """GPUs of each node."""
        return [len(node.devices) for node in self.plan.cluster.nodes]

    @property
    def names(self) -> list[str]:
        """Of the nodes."""
        return [host.name for host in self.hosts] or [f"NODE{number}" for number in range(len(self.slots))]

    @property
    def address(self) -> str:
        """Where rank 0 is."""
        return self.names[0] if len(self.slots) > 1 else "127.0.0.1"

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are CPU processes."""
        return self.plan.cluster.devices[0].kind == "cpu"

    @property
    def rank(self) -> list[str]:
        """The arguments of every rank."""
        return ["--plan", str(self.plan_path), *self.settings.arguments()]

    def environment(self) -> dict[str, str]:
        """What ranks are to find."""
        found = {"DS_ACCELERATOR": "cpu"} if self.is_cpu else {}
        if self.access.nic is not None:
            found |= {"GLOO_SOCKET_IFNAME": self.access.nic, "NCCL_SOCKET_IFNAME": self.access.nic}
        return found

    def line(self, words: Sequence[str], **more: str) -> str:
        """A line for a shell, with its environment before it."""
        pairs = [f"{name}={shlex.quote(value)}" for name, value in (self.environment() | more).items()]
        return " ".join([*pairs, shlex.join(words)])

    def on_each(self, words: Callable[[int], list[str]]) -> str:
        """A line for each node, below its name."""
        here = f"# in {Path.cwd()}, on each node the line below its name; nothing is waited for longer than 5 minutes\n"
        return here + "\n".join(f"# {name}\n{self.line(words(number))}" for number, name in enumerate(self.names))

    def nodes_from(self, launcher: str) -> str:
        """The hostfile, for a launcher that reads it.

        Raises:
            RequestError: there is none.
        """
        if self.hostfile is None:
            raise RequestError(
                f"--print {launcher} needs a hostfile",
                because="this launcher reads there which nodes there are",
                hint="--hostfile HOSTS, with a line `NAME slots=GPUS` for each node",
            )
        return str(self.hostfile)


def commands(launcher: Launcher, asked: Asked) -> str:
    """What to run.

    Raises:
        RequestError: the launcher needs to know more, or cannot do what is planned.
    """
    return LAUNCHERS[launcher](asked)


def _deepspeed(asked: Asked) -> str:
    hostfile = asked.nodes_from("deepspeed")
    port = [] if asked.access.ssh_port is None else ["--ssh_port", str(asked.access.ssh_port)]
    words = ["deepspeed", "--hostfile", hostfile, *port, "--master_port", str(asked.port)]
    return asked.line([*words, "--module", RANK[1], *asked.rank])


def _no_ssh(asked: Asked) -> str:
    hostfile = asked.nodes_from("no-ssh")
    meeting = ["--master_addr", asked.address, "--master_port", str(asked.port)]
    return asked.on_each(
        lambda number: [
            "deepspeed", "--hostfile", hostfile, "--no_ssh", "--node_rank", str(number), *meeting, "--module",
            RANK[1], *asked.rank,
        ]
    )  # fmt: skip


def _torchrun(asked: Asked) -> str:
    return asked.on_each(
        lambda number: [
            "torchrun", "--nnodes", str(len(asked.slots)), "--node-rank", str(number), "--nproc-per-node",
            str(asked.slots[number]), "--master-addr", asked.address, "--master-port", str(asked.port), *RANK,
            *asked.rank,
        ]
    )  # fmt: skip


def _openmpi(asked: Asked) -> str:
    hostfile = asked.nodes_from("openmpi")
    passed = asked.environment() | {"MASTER_ADDR": asked.address, "MASTER_PORT": str(asked.port)}
    words = ["mpirun", "--hostfile", hostfile, "-n", str(sum(asked.slots)), "--bind-to", "none"]
    if asked.access.ssh_port is not None:
        words += ["--mca", "plm_rsh_args", f"-p {asked.access.ssh_port}"]
    if asked.access.nic is not None:
        words += ["--mca", "btl_tcp_if_include", asked.access.nic, "--mca", "oob_tcp_if_include", asked.access.nic]
    for name, value in passed.items():
        words += ["-x", f"{name}={value}"]
    return shlex.join([*words, sys.executable, *RANK, *asked.rank])


def _slurm(asked: Asked) -> str:
    if len(set(asked.slots)) > 1:
        raise RequestError(
            "srun cannot start this plan's ranks",
            because=f"its nodes have {', '.join(map(str, asked.slots))} GPUs, and srun gives each node as many tasks",
            hint="use --print torchrun, and srun one torchrun a node",
        )
    number = str(asked.slots[0])
    words = ["srun", "--nodes", str(len(asked.slots)), "--ntasks-per-node", number, "--kill-on-bad-exit=1"]
    words += [] if asked.is_cpu else ["--gpus-per-node", number]
    first = '# in a job, `salloc` or `sbatch`\nexport MASTER_ADDR="$(scontrol show hostnames | head -n 1)"\n'
    return first + asked.line([*words, sys.executable, *RANK, *asked.rank], MASTER_PORT=str(asked.port))


LAUNCHERS: dict[Launcher, Callable[[Asked], str]] = {
    "no-ssh": _no_ssh,
    "deepspeed": _deepspeed,
    "torchrun": _torchrun,
    "openmpi": _openmpi,
    "slurm": _slurm,
}
