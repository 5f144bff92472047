"""Commands that start a plan's ranks under other launchers: one for each node, or one for all."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.build_cluster import HostfileEntry
from frugal.distributed.connections.secret import SECRET_FILE
from frugal.distributed.env import DEFAULT_PORT
from frugal.errors import refuse
from frugal.launch.host_report import NETWORK
from frugal.launch.local import RANK_MODULE
from frugal.planning.plan import Plan

Launcher = Literal["no-ssh", "deepspeed", "torchrun", "openmpi", "slurm", "kubernetes"]

NAME, FOLDER, SECRET_FOLDER = "frugal-run", "/workspace", "/etc/frugal"
PORT_NAME = "rendezvous"
MOST_FAILURES = 3
"""Failures of pods until the Job is given up; those of machines that are taken away do not count."""

LAST_SECONDS = 60
"""Time that a pod has to end, beyond that in which a run saves its step."""

BEFORE = f"""\
# Before: an IMAGE with frugal, a PersistentVolumeClaim `{NAME}` that all pods can write (ReadWriteMany), with the plan
# and the data in it, paths as below {FOLDER}, and the run's secret, by which pods know each other:
#     kubectl create secret generic {NAME} --from-literal=secret="$(head -c 32 /dev/urandom | base64)"
# A pod that is evicted saves its step within its grace period; the Job starts pods anew, and they resume the run.
# These manifests fit the published schemas; they have not run on a cluster.
"""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The run that a launcher starts.

    Attributes:
        plan_path: where the ranks find the plan.
        hosts: the nodes, where a hostfile names them.
        run_arguments: of every rank, for the run's settings.
        grace: seconds in which ranks may end.
        port: of the rendezvous on the first node.
    """

    plan: Plan
    plan_path: Path
    hosts: Sequence[HostfileEntry]
    hostfile: Path | None
    run_arguments: Sequence[str]
    grace: int
    port: int = DEFAULT_PORT

    @property
    def slots(self) -> list[int]:
        """The number of GPUs of each node."""
        return [len(node.devices) for node in self.plan.cluster.nodes]

    @property
    def node_names(self) -> list[str]:
        """The nodes' names, or placeholders for them."""
        return [host.name for host in self.hosts] or [f"NODE{number}" for number in range(len(self.slots))]

    @property
    def address(self) -> str:
        """The address of rank 0's node."""
        return self.node_names[0] if len(self.slots) > 1 else "127.0.0.1"

    @property
    def is_cpu(self) -> bool:
        """True if ranks are CPU processes."""
        return self.plan.cluster.devices[0].kind == "cpu"

    @property
    def rank_arguments(self) -> list[str]:
        """The arguments of every rank."""
        return ["--plan", str(self.plan_path), *self.run_arguments]

    @property
    def node_words(self) -> list[str]:
        """The words after `python` that start the ranks of one node, where a scheduler starts one process on each."""
        return ["-m", "frugal.launch.one_node", *self.rank_arguments]

    def environment(self) -> dict[str, str]:
        """Return the variables that every rank needs."""
        variables = {"DS_ACCELERATOR": "cpu"} if self.is_cpu else {}
        variables |= {name: os.environ[name] for name in NETWORK if os.environ.get(name, "lo") != "lo"}
        return variables | cuda_allocator.settings(
            self.plan.cluster, os.environ, self.plan.strategy.expandable_segments
        )

    def shell_line(self, words: Sequence[str], **more: str) -> str:
        """Return a line for a shell, with its environment before it."""
        pairs = [f"{name}={shlex.quote(value)}" for name, value in (self.environment() | more).items()]
        return " ".join([*pairs, shlex.join(words)])

    def line_per_node(self, words: Callable[[int], list[str]]) -> str:
        """Return a line for each node, below its name."""
        here = f"# in {Path.cwd()}, on each node the line below its name; nothing is waited for longer than 5 minutes"
        here += f"; {SECRET_FILE} in its environment keeps strangers out\n" if len(self.slots) > 1 else "\n"
        return here + "\n".join(
            f"# {name}\n{self.shell_line(words(number))}" for number, name in enumerate(self.node_names)
        )


def _deepspeed(launch: LaunchRequest) -> str:
    return launch.shell_line([
        "deepspeed", "--hostfile", str(launch.hostfile), "--master_port", str(launch.port), "--module", RANK_MODULE,
        *launch.rank_arguments,
    ])  # fmt: skip


def _no_ssh(launch: LaunchRequest) -> str:
    return launch.line_per_node(
        lambda number: [
            "deepspeed", "--hostfile", str(launch.hostfile), "--no_ssh", "--node_rank", str(number), "--master_addr",
            launch.address, "--master_port", str(launch.port), "--module", RANK_MODULE, *launch.rank_arguments,
        ]
    )  # fmt: skip


def _torchrun(launch: LaunchRequest) -> str:
    return launch.line_per_node(
        lambda number: [
            "torchrun", "--nnodes", str(len(launch.slots)), "--node-rank", str(number), "--nproc-per-node",
            str(launch.slots[number]), "--master-addr", launch.address, "--master-port", str(launch.port),
            "-m", RANK_MODULE, *launch.rank_arguments,
        ]
    )  # fmt: skip


def _openmpi(launch: LaunchRequest) -> str:
    passed = launch.environment() | {"MASTER_ADDR": launch.address, "MASTER_PORT": str(launch.port)}
    exported = [f"{name}={value}" for name, value in passed.items()]
    exported += [SECRET_FILE] if SECRET_FILE in os.environ else []
    words = ["mpirun", "--hostfile", str(launch.hostfile), "-n", str(sum(launch.slots)), "--bind-to", "none"]
    words += [word for each in exported for word in ("-x", each)]
    return shlex.join([*words, sys.executable, "-m", RANK_MODULE, *launch.rank_arguments])


def _slurm(launch: LaunchRequest) -> str:
    """Return a line for a job of one task a node. Nodes that differ get their GPUs from the job's own request."""
    words = ["srun", "--nodes", str(len(launch.slots)), "--ntasks-per-node", "1"]
    if not launch.is_cpu and len(set(launch.slots)) == 1:
        words += ["--gpus-per-node", str(launch.slots[0])]
    first = '# in a job, `salloc` or `sbatch`\nexport MASTER_ADDR="$(scontrol show hostnames | head -n 1)"\n'
    return first + launch.shell_line([*words, sys.executable, *launch.node_words], MASTER_PORT=str(launch.port))


def _kubernetes(launch: LaunchRequest) -> str:
    """Return the manifests of a Job with one pod a node, which meet through a headless Service.

    Raises:
        RequestError: its nodes differ.
    """
    refuse(
        (
            len(set(launch.slots)) > 1,
            "one Job cannot start this plan's nodes",
            f"they have {', '.join(map(str, launch.slots))} GPUs, and all pods of a Job are alike",
            "plan for nodes that are alike: frugal plan --nodes N --gpus M",
        )
    )
    return manifests(
        ["python", *launch.node_words],
        launch.environment() | {"MASTER_PORT": str(launch.port)},
        num_nodes=len(launch.slots),
        num_gpus=0 if launch.is_cpu else launch.slots[0],
        grace=launch.grace,
    )


def manifests(
    command: Sequence[str], environment: Mapping[str, str], *, num_nodes: int, num_gpus: int, grace: int
) -> str:
    """Return YAML that starts `command` once a node.

    `environment` has at least MASTER_PORT. `num_gpus` of each node; 0: ranks are CPU processes. `grace`: seconds in
    which a run that is asked to stop saves its step.
    """
    labels = {"app": NAME}
    variables = {
        **environment,
        "MASTER_ADDR": f"{NAME}-0.{NAME}" if num_nodes > 1 else "127.0.0.1",
        "FRUGAL_SECRET_FILE": f"{SECRET_FOLDER}/secret",
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": PORT_NAME, "port": int(environment["MASTER_PORT"])}],
        },
    }
    container = {
        "name": "ranks",
        "image": "IMAGE",
        "workingDir": FOLDER,
        "command": [*command],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        **({"resources": {"limits": {"nvidia.com/gpu": num_gpus}}} if num_gpus else {}),
        "volumeMounts": [
            {"name": "run", "mountPath": FOLDER},
            {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # NCCL and gloo share memory there
        ],
    }
    pod = {
        "subdomain": NAME,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace + LAST_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": NAME}},
            {"name": "secret", "secret": {"secretName": NAME, "defaultMode": 0o400}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    job: dict[str, Any] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": NAME},
        "spec": {
            "completionMode": "Indexed",
            "completions": num_nodes,
            "parallelism": num_nodes,
            "backoffLimit": MOST_FAILURES * num_nodes,
            "podFailurePolicy": {
                "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return BEFORE + yaml.safe_dump_all([service, job], sort_keys=False, width=120)


LAUNCHERS: dict[Launcher, Callable[[LaunchRequest], str]] = {
    "no-ssh": _no_ssh,
    "deepspeed": _deepspeed,
    "torchrun": _torchrun,
    "openmpi": _openmpi,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
}


def printed(launcher: Launcher, launch: LaunchRequest) -> str:
    """Return the line, or a line for each node, that starts the ranks.

    Raises:
        RequestError: the launcher needs to know more, or cannot do what is planned.
    """
    refuse(
        (
            launcher in ("no-ssh", "deepspeed", "openmpi") and launch.hostfile is None,
            f"--print {launcher} needs a hostfile",
            "this launcher reads there which nodes there are",
            "--hostfile HOSTS, with a line `NAME slots=GPUS` for each node",
        )
    )
    return LAUNCHERS[launcher](launch)
