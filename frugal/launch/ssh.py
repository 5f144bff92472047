"""Reaching the hosts of a hostfile: ssh and pdsh that ask no questions, and what is wrong with what hosts answer."""

import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address, ip_interface
from pathlib import Path

import msgspec

from frugal.config.cluster import DeviceKind
from frugal.config.hostfile import HostfileEntry
from frugal.config.local_host import versions
from frugal.config.run import Settings
from frugal.errors import RequestError
from frugal.launch.host_report import HostReport
from frugal.units import format_bytes

CONNECT_SECONDS = 10
ASK_SECONDS = 120  # importing torch from a busy network file system takes long
FAN_OUT = 1024

PASSED = (
    "PYTHON", "NCCL", "GLOO", "MLFLOW", "UCX", "MV2", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "OMP_", "DS_",
    "DEEPSPEED_", "XDG_CACHE_HOME", "CUDA_HOME",
)  # fmt: skip
"""What these names begin with is passed on to all nodes, as DeepSpeed's launcher does with the first six."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """How hosts are reached, and over which network interface ranks talk; None: ssh's and the library's own choice."""

    ssh_port: int | None = None
    nic: str | None = None

    def options(self) -> list[str]:
        """ssh's: no prompt, no waiting for a host that is not there, an end where one goes silent."""
        options = [
            "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "ServerAliveInterval=15",
            "-o", "ServerAliveCountMax=3",
        ]  # fmt: skip
        return options if self.ssh_port is None else [*options, "-p", str(self.ssh_port)]

    def environment(self) -> dict[str, str]:
        """What ranks are to find, on every node: settings of ours that are passed on, then those of DeepSpeed's file.

        Raises:
            RequestError: a line of the file is no NAME=VALUE.
        """
        found = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
        for folder in (Path.home(), Path()):
            found |= _environment_file(folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env"))
        if self.nic is not None:
            found |= {"GLOO_SOCKET_IFNAME": self.nic, "NCCL_SOCKET_IFNAME": self.nic}
        return found


def _environment_file(path: Path) -> dict[str, str]:
    """The NAME=VALUE lines of DeepSpeed's `.deepspeed_env`; nothing where there is none."""
    found = {}
    if path.is_file():
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            name, is_pair, value = line.strip().partition("=")
            if is_pair:
                found[name.strip()] = value.strip().strip('"')
            elif line.strip() and not line.lstrip().startswith("#"):
                raise RequestError(
                    f"{path}, line {number}: `{line.strip()}` is no NAME=VALUE",
                    because="DeepSpeed passes this file's lines to all nodes as environment variables",
                )
    return found


@dataclass(frozen=True)
class Silent:
    """A host that gave no report, and why."""

    why: str


def ask(
    hosts: Sequence[HostfileEntry], access: Access, folder: Path, kind: DeviceKind, *, probe: bool = False
) -> list[HostReport | Silent]:
    """What each host has, or why it does not say; all are asked at once. `folder` is the run's; `probe`: each GPU, too.

    Shared must be the folder of the run's checkpoints; where that is not there yet, the one that it will be in.
    """
    environment = {name: value for name, value in access.environment().items() if name.startswith("PYTHON")}
    with _token(Settings(out=folder).checkpoints) as token, ThreadPoolExecutor(min(len(hosts), 64)) as pool:
        command = remote(
            [
                sys.executable, "-m", "frugal.launch.host_report", "--folder", str(folder), "--token", str(token),
                *(["--cuda"] if kind == "cuda" else []), *(["--probe"] if probe and kind == "cuda" else []),
            ],
            environment,
        )  # fmt: skip
        found = list(pool.map(lambda host: _ask(host, access, command), hosts))
        return [
            Silent(f"does not see {token.parent} as this machine does: the run's folder must be shared by all")
            if isinstance(report, HostReport) and report.token != token.name
            else report
            for report in found
        ]


def _ask(host: HostfileEntry, access: Access, command: str) -> HostReport | Silent:
    try:
        done = subprocess.run(
            ["ssh", *access.options(), "--", host.name, command], capture_output=True, text=True, timeout=ASK_SECONDS,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Silent(f"did not answer within {ASK_SECONDS} s")
    except FileNotFoundError:
        return Silent("cannot be asked: there is no ssh on this machine")
    said = done.stderr.strip().splitlines()
    last = said[-1].strip() if said else f"ssh ended with {done.returncode}"
    if done.returncode == 255:
        return Silent(f"does not answer: {last}")
    if done.returncode:
        return Silent(f"cannot run frugal: {last}")
    try:
        return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=HostReport)
    except (msgspec.DecodeError, IndexError):
        return Silent(f"gave no report: {done.stdout.strip()[-100:] or last}")


@contextmanager
def _token(folder: Path) -> Iterator[Path]:
    """A file in the folder, or where that will be, which holds its own name."""
    path = folder.absolute()
    while not path.is_dir():
        path = path.parent
    path = path / f".frugal-{secrets.token_hex(8)}"
    try:
        path.write_text(path.name)
    except OSError as error:
        raise RequestError(
            f"cannot write to {path.parent}", because=str(error.strerror), hint="choose another folder with --out"
        ) from None
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def problems(
    hosts: Sequence[HostfileEntry], reports: Sequence[HostReport | Silent], access: Access, kind: DeviceKind
) -> list[str]:
    """What would stop a run, a line each."""
    ours, here = versions(), socket.gethostname()
    found = []
    for host, report in zip(hosts, reports, strict=True):
        if isinstance(report, Silent):
            found.append(f"{host.name} {report.why}")
            continue
        for name, version in ours.items():
            if report.versions.get(name) != version:
                found.append(f"{host.name} has {name} {report.versions.get(name)}; {here}, this machine, has {version}")
        found += [f"{host.name} {text}" for text in _lacking(host, report, kind)]
        if access.nic is not None and access.nic not in report.networks:
            there = ", ".join(report.networks) or "none"
            found.append(f"{host.name} has no network interface {access.nic} with an address; it has {there}")
    return found


def _lacking(host: HostfileEntry, report: HostReport, kind: DeviceKind) -> Iterator[str]:
    """What a host has less of than its line says. A tenth is let pass: a card of 12G reports 11.76 GiB."""
    if kind == "cuda":
        number = len(report.gpus) if report.cuda_devices is None else report.cuda_devices
        if number == 0:
            yield "has no GPU that torch can use; CPU ranks take --device cpu"
        elif number < host.slots:
            yield f"has {number} GPU{'s' * (number != 1)} that torch can use, its line says slots={host.slots}"
        said = host.memory * host.slots if len(host.memory) == 1 else host.memory
        for place, (gpu, memory) in enumerate(zip(report.gpus, said, strict=False)):
            if gpu.memory_bytes < 0.9 * memory:
                has = format_bytes(gpu.memory_bytes)
                yield f"has {has} on GPU {place} ({gpu.name}), its line says {format_bytes(memory)}"
    for what, there, says in (
        ("host memory", report.memory_bytes, host.host_memory_bytes),
        ("free disk", report.free_disk_bytes, host.disk_bytes),
    ):
        if says is not None and there < 0.9 * says:
            yield f"has {format_bytes(there)} of {what}, its line says {format_bytes(says)}"


@dataclass(frozen=True)
class Place:
    """A host that is ready for ranks: what it has, and which of its GPUs they use, by their numbers there."""

    host: HostfileEntry
    report: HostReport
    gpus: tuple[int, ...]


def meeting_place(reports: Sequence[HostReport], access: Access) -> str:
    """The address of the first host at which the others reach it: on the interface named, or on a network they share.

    What its name resolves to there may be its loopback.
    """
    first, *others = reports
    own = [ip_interface(each) for nic, found in first.networks.items() for each in found if access.nic in (None, nic)]
    if not own:
        return first.address or first.host
    for other in others:
        if other.address and (shared := [each for each in own if ip_address(other.address) in each.network]):
            return str(shared[0].ip)
    reached = [each for each in own if str(each.ip) == first.address]
    return str((reached or own)[0].ip)


def remote(words: Sequence[str], environment: dict[str, str]) -> str:
    """One line for a shell on another host: the words, in this folder, with this environment."""
    pairs = [f"{name}={value}" for name, value in environment.items()]
    return f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*pairs, *words])}"  # noqa: PTH109  # a plain string


def pdsh(hosts: Sequence[HostfileEntry], command: str) -> list[str]:
    """The words that run a shell's line on all hosts at once, without names before what they print.

    In `command`, `%n` is the place of the host in `hosts`; see `literal`.
    """
    return ["pdsh", "-R", "ssh", "-S", "-N", "-f", str(FAN_OUT), "-w", ",".join(h.name for h in hosts), command]


def literal(command: str) -> str:
    """A line in which pdsh replaces nothing."""
    return command.replace("%", "%%")


def pdsh_environment(access: Access) -> dict[str, str]:
    """What pdsh needs to find: its ssh asks no questions either."""
    options = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {' '.join(access.options())}".strip()
    return {**os.environ, "PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": options}


PDSH_SAYS = re.compile(rb"^pdsh@\S+: \S+: ssh exited with exit code ")
"""How pdsh says that a node's ranks failed, which they said themselves."""
