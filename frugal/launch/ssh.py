"""The hosts of a run: their reports, what they lack, and the address that all of them reach.

Reports come over ssh, or without it from `frugal doctor` on each host, started by srun, mpirun or by hand: rank 0
collects them where the ranks of a run would meet, under the run's secret.
"""

import os
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from ipaddress import ip_address, ip_interface
from pathlib import Path

import msgspec

from frugal.config.hardware.build_cluster import HostfileEntry
from frugal.config.hardware.cluster import DeviceKind
from frugal.config.hardware.local_host import versions
from frugal.config.run_settings import RunSettings
from frugal.distributed import env
from frugal.errors import RequestError
from frugal.launch import host_report
from frugal.launch.host_report import HostReport
from frugal.units import format_bytes, plural

CONNECT_SECONDS = 10
ASK_SECONDS = 120  # importing torch from a busy network file system takes long

PASSED = (
    "PYTHON", "PYTORCH_", "NCCL", "GLOO", "MLFLOW", "UCX", "MV2", "HF_", "HUGGING_FACE_", "TRANSFORMERS_",
    "TOKENIZERS_", "TORCH_", "OMP_", "DS_", "DEEPSPEED_", "XDG_CACHE_HOME", "CUDA_HOME", "AWS_", "GOOGLE_", "AZURE_",
    "FSSPEC_",
)  # fmt: skip
"""Prefixes of variables that are passed on to all nodes, as DeepSpeed's launcher does with `PYTHON` and the five after
`PYTORCH_`.

Tokens are among them: they are never words of a command, which every user of a host can list.
"""


NETWORK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface of ranks. Rank 0 is met on that of gloo's, if it is set."""

OPTIONS = (
    "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "ServerAliveInterval=15",
    "-o", "ServerAliveCountMax=3",
)  # fmt: skip
"""Options of ssh: no prompt, a timeout for a host that is not there, an end if it stops answering. Ports and keys of
hosts stand in ssh's own configuration."""


def command(words: Sequence[str]) -> str:
    """Return a line for a shell on another host: the words, in this folder, with the variables for Python."""
    python = [f"{name}={value}" for name, value in environment().items() if name.startswith("PYTHON")]
    return f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*python, *words])}"  # noqa: PTH109  # a plain string


def environment() -> dict[str, str]:
    """Return the environment of ranks on every node: variables that are passed on, then those of DeepSpeed's file.

    Raises:
        RequestError: a line of the file is no NAME=VALUE.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
    for folder in (Path.home(), Path()):
        variables |= _environment_file(folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env"))
    return variables


def _environment_file(path: Path) -> dict[str, str]:
    """Return the NAME=VALUE lines of DeepSpeed's `.deepspeed_env`; none where there is no such file."""
    variables = {}
    if path.is_file():
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            name, is_pair, value = line.strip().partition("=")
            if is_pair:
                variables[name.strip()] = value.strip().strip('"')
            elif line.strip() and not line.lstrip().startswith("#"):
                raise RequestError(
                    f"{path}, line {number}, is no NAME=VALUE",  # and not what it says: it may be a token
                    because="DeepSpeed passes this file's lines to all nodes as environment variables",
                )
    return variables


@dataclass(frozen=True)
class UnreachableHost:
    """A host that gave no report, and the reason."""

    why: str


def collect_reports(
    hosts: Sequence[HostfileEntry], folder: Path, kind: DeviceKind, *, probe: bool = False
) -> list[HostReport | UnreachableHost]:
    """Return a report from each host, or why there is none; all are asked at once.

    `folder` is the run's: all hosts must share it, or where it does not exist yet, the one that it will be in. With
    `probe` every GPU is tried, which takes seconds.
    """
    with _token(RunSettings(out=folder).checkpoints) as token, ThreadPoolExecutor(min(len(hosts), 64)) as pool:
        line = command(
            [
                sys.executable, "-m", "frugal.launch.host_report", "--folder", str(folder), "--token", str(token),
                *(["--cuda"] if kind == "cuda" else []), *(["--probe"] if probe and kind == "cuda" else []),
            ]
        )  # fmt: skip
        return [_seeing(token, report) for report in pool.map(lambda host: _collect_report(host, line), hosts)]


def _seeing(token: Path, report: HostReport | UnreachableHost) -> HostReport | UnreachableHost:
    """Return the report of a host that sees the token's content, or that it does not."""
    if isinstance(report, UnreachableHost) or report.token == token.name:
        return report
    return UnreachableHost(f"does not see {token.parent} as this machine does: the run's folder must be shared by all")


def collect_from_ranks(
    folder: Path, kind: DeviceKind
) -> tuple[list[HostfileEntry], list[HostReport | UnreachableHost]]:
    """Return on rank 0 the hosts, each with its report or why there is none; nothing on the others. `folder` as above.

    Raises:
        RequestError: rank 0 cannot be reached.
    """
    from frugal.distributed import rendezvous  # torch takes seconds

    with _token(RunSettings(out=folder).checkpoints) if env.rank() == 0 else nullcontext() as own:
        token = Path(rendezvous.share("token", str(own), str))
        report = host_report.collect(folder, token, cuda=kind == "cuda")
        missing = UnreachableHost(f"did not come within {ASK_SECONDS} s: was the command started there?")
        reports = rendezvous.collect(report, HostReport, ASK_SECONDS)
        names = [f"rank {number}" if each is None else each.host for number, each in enumerate(reports)]
        return [HostfileEntry(name=name, slots=1) for name in names], [
            _seeing(token, each or missing) for each in reports
        ]


def lines_without_ssh(names: Sequence[str], words: Sequence[str]) -> str:
    """Return the commands that run `frugal doctor` with `words` on each of these hosts, for `collect_from_ranks`."""
    command = shlex.join([sys.executable, "-m", "frugal", "doctor", *words])
    place = f"WORLD_SIZE={len(names)} MASTER_ADDR={names[0]} MASTER_PORT={env.DEFAULT_PORT}"
    lines = [f"# {name}\nRANK={number} {place} {command}" for number, name in enumerate(names)]
    slurm = f"MASTER_ADDR={names[0]} srun --nodes {len(names)} --ntasks-per-node 1 {command}"
    return "\n".join([f"# on each node the line below its name, or with SLURM: {slurm}", *lines])


def _collect_report(host: HostfileEntry, line: str) -> HostReport | UnreachableHost:
    try:
        done = subprocess.run(
            ["ssh", *OPTIONS, "--", host.name, line], capture_output=True, text=True, timeout=ASK_SECONDS,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return UnreachableHost(f"did not answer within {ASK_SECONDS} s")
    except FileNotFoundError:
        return UnreachableHost("cannot be asked: there is no ssh on this machine")
    stderr = done.stderr.strip().splitlines()
    last = stderr[-1].strip() if stderr else f"ssh ended with {done.returncode}"
    if done.returncode == 255:
        return UnreachableHost(f"does not answer: {last}")
    if done.returncode:
        return UnreachableHost(f"cannot run frugal: {last}")
    try:
        return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=HostReport)
    except (msgspec.DecodeError, IndexError):
        return UnreachableHost(f"gave no report: {done.stdout.strip()[-100:] or last}")


@contextmanager
def _token(folder: Path) -> Iterator[Path]:
    """Yield a file in the folder, or where that will be, which holds its own name."""
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
    hosts: Sequence[HostfileEntry], reports: Sequence[HostReport | UnreachableHost], kind: DeviceKind
) -> list[str]:
    """Return the problems that would prevent a run, one line each."""
    ours, here, nics = versions(), socket.gethostname(), environment().get(NETWORK[0])
    lines = []
    for host, report in zip(hosts, reports, strict=True):
        if isinstance(report, UnreachableHost):
            lines.append(f"{host.name} {report.why}")
            continue
        for name, version in ours.items():
            if report.versions.get(name) != version:
                lines.append(f"{host.name} has {name} {report.versions.get(name)}; {here}, this machine, has {version}")
        lines += [f"{host.name} {text}" for text in _shortages(host, report, kind)]
        if nics is not None and not set(nics.split(",")) <= set(report.networks):
            others = ", ".join(report.networks) or "none"
            lines.append(f"{host.name} has no network interface {nics} with an address; it has {others}")
    return lines


def _shortages(host: HostfileEntry, report: HostReport, kind: DeviceKind) -> Iterator[str]:
    """Yield what a host has less of than its line says, by more than a tenth: a GPU of 12G reports 11.76 GiB."""
    if kind == "cuda":
        num_gpus = len(report.gpus) if report.cuda_devices is None else report.cuda_devices
        if num_gpus == 0:
            yield "has no GPU that torch can use; CPU ranks take --device cpu"
        elif num_gpus < host.slots:
            yield f"has {plural(num_gpus, 'GPU')} that torch can use, its line says slots={host.slots}"
        memories = host.memory * host.slots if len(host.memory) == 1 else host.memory
        for number, (gpu, memory) in enumerate(zip(report.gpus, memories, strict=False)):
            if gpu.memory_bytes < 0.9 * memory:
                has = format_bytes(gpu.memory_bytes)
                yield f"has {has} on GPU {number} ({gpu.name}), its line says {format_bytes(memory)}"
    for what, actual, stated in (
        ("host memory", report.memory_bytes, host.host_memory_bytes),
        ("free disk", report.free_disk_bytes, host.disk_bytes),
    ):
        if stated is not None and actual < 0.9 * stated:
            yield f"has {format_bytes(actual)} of {what}, its line says {format_bytes(stated)}"


@dataclass(frozen=True)
class ReadyHost:
    """A host that can run ranks: its line of the hostfile, its report, and the numbers of the GPUs that ranks use."""

    host: HostfileEntry
    report: HostReport
    gpus: tuple[int, ...]


def rendezvous_address(reports: Sequence[HostReport]) -> str:
    """Return the address at which the others reach the first host: on GLOO_SOCKET_IFNAME, or on a network they share.

    Not what its name resolves to there, which may be its loopback.
    """
    first, *others = reports
    nics = environment().get(NETWORK[0])  # of gloo's, which takes several, separated by commas
    named = first.networks if nics is None else nics.split(",")
    own = [ip_interface(address) for name in named for address in first.networks.get(name, [])]
    if not own:
        return first.address or first.host
    for other in others:
        if other.address and (shared := [ip for ip in own if ip_address(other.address) in ip.network]):
            return str(shared[0].ip)
    reached = [ip for ip in own if str(ip.ip) == first.address]
    return str((reached or own)[0].ip)
