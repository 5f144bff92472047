"""Reports of hosts: what each has, what it lacks for a run, and the address at which all of them reach the first.

Reports come over ssh from

    python -m frugal.launch.host_report --folder run --token run/.token-1f2e --cuda

which prints one as JSON; or without ssh from `frugal doctor` on each host, started by srun, mpirun or by hand: rank 0
collects them where the ranks of a run would meet, under the run's secret. Each GPU is tried by a process of its own:
one that has fallen off the bus may still be counted by the driver, and a call to it may never return.
"""

import os
import platform
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from ipaddress import ip_address, ip_interface
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]  # has no types

from frugal.config.hardware import local_host
from frugal.config.hardware.build_cluster import HostfileEntry
from frugal.config.hardware.cluster import DeviceKind
from frugal.config.run_settings import CHECKPOINTS
from frugal.config.schema import parse
from frugal.distributed import env
from frugal.distributed.process_group import free_port
from frugal.errors import RequestError, failure
from frugal.units import MIB, format_bytes, plural

_OWN_LINK = ("127.", "::1", "fe80:")
"""Beginnings of addresses that mean something else on another host."""


class Gpu(msgspec.Struct):
    """One GPU as nvidia-smi reports it, or torch where nvidia-smi is missing; sizes in bytes."""

    name: str
    memory_bytes: int
    free_bytes: int


class HostReport(msgspec.Struct):
    """One host.

    Attributes:
        host: its own name.
        address: by which ssh reached it; empty where it was not asked over ssh.
        networks: addresses with their prefix, such as `10.0.0.1/24`, by interface; without loopback. IPv6 where an
            interface has no other.
        cores: that may be used.
        memory_bytes: of the host.
        free_memory_bytes: that may still be taken, by the container's limit, too.
        free_disk_bytes: of the run's folder.
        cuda_devices: GPUs that torch can use; None where torch was not asked.
        working_gpus: the numbers of those that memory can be allocated on; None where none was tried.
        compilers: path by name of the C++ compiler, nvcc and ninja, which DeepSpeed's own operators need.
        token: content of the token file; None where there is none: then the folder is not shared.
        free_port: a TCP port that no process listens on.
    """

    host: str
    address: str
    python: str
    versions: dict[str, str]
    networks: dict[str, list[str]]
    cores: int
    memory_bytes: int
    free_memory_bytes: int
    free_disk_bytes: int
    gpus: list[Gpu]
    driver: str
    cuda_devices: int | None
    working_gpus: list[int] | None
    compilers: dict[str, str]
    token: str | None
    free_port: int


def collect(folder: Path, token: Path | None, *, cuda: bool, probe: bool = False) -> HostReport:
    """Return the report of this host. With `cuda` torch counts GPUs, with `probe` each is tried: both take seconds."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    while not folder.exists():  # it will be made
        folder = folder.absolute().parent
    networks = {}
    for name, addresses in psutil.net_if_addrs().items():
        others = [each for each in addresses if not each.address.startswith(_OWN_LINK)]
        ipv4 = [each for each in others if each.family == socket.AF_INET]
        if used := ipv4 or [each for each in others if each.family == socket.AF_INET6]:
            masks = [int(ip_address(each.netmask or "255.255.255.255")) for each in used]
            networks[name] = [f"{each.address}/{mask.bit_count()}" for each, mask in zip(used, masks, strict=True)]
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")
    compilers = {"c++": shutil.which(os.environ.get("CXX", "c++")), "nvcc": nvcc, "ninja": shutil.which("ninja")}
    content = cuda_devices = None
    if token is not None:
        with suppress(OSError):
            content = token.read_text()
    if cuda:
        import torch  # takes seconds: only where a plan is for GPUs

        cuda_devices = torch.cuda.device_count()
    said = local_host.asked_of_driver("name,memory.total,memory.free")
    of_driver = re.findall(r"^(.+), (\d+), (\d+)$", said, re.MULTILINE)
    return HostReport(
        host=socket.gethostname(),
        address=connection[2] if len(connection) == 4 else "",
        python=platform.python_version(),
        versions=local_host.versions(),
        networks=networks,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        free_memory_bytes=local_host.available_bytes(),
        free_disk_bytes=shutil.disk_usage(folder).free,
        gpus=[Gpu(name, int(total) * MIB, int(free) * MIB) for name, total, free in of_driver]
        or (_gpus_of_torch() if cuda else []),
        driver=local_host.cuda_driver(),
        cuda_devices=cuda_devices,
        working_gpus=[int(name) for name in working_gpus([*map(str, range(cuda_devices or 0))])] if probe else None,
        compilers={name: path for name, path in compilers.items() if path is not None},
        token=content,
        free_port=free_port(),
    )


def _gpus_of_torch() -> list[Gpu]:
    """Return the GPUs that torch finds, as in a container without nvidia-smi."""
    import torch

    gpus = []
    with suppress(RuntimeError):  # a driver that does not work is reported by `working_gpus`
        for number in range(torch.cuda.device_count()):
            free_bytes, total_bytes = torch.cuda.mem_get_info(number)
            gpus.append(Gpu(torch.cuda.get_device_properties(number).name, total_bytes, free_bytes))
    return gpus


PROBE_SECONDS = 60


def working_gpus(names: Sequence[str]) -> list[str]:
    """Return the GPUs on which a few bytes can be allocated; `names` as in CUDA_VISIBLE_DEVICES."""
    with ThreadPoolExecutor(max(1, len(names))) as threads:
        return [name for name, works in zip(names, threads.map(_gpu_works, names), strict=True) if works]


def _gpu_works(gpu: str) -> bool:
    probe = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda').item()"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    try:
        return subprocess.run(probe, env=environment, capture_output=True, timeout=PROBE_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


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

    An engine of this process alone has named the interface `lo`, which leads to no other host.

    Raises:
        RequestError: a line of the file is no NAME=VALUE.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PASSED) and not (name in NETWORK and value == "lo")
    }
    for folder in (Path.home(), Path()):
        path = folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        for number, line in enumerate(path.read_text().splitlines() if path.is_file() else [], start=1):
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
    with _token(folder / CHECKPOINTS) as token, ThreadPoolExecutor(min(len(hosts), 64)) as pool:
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

    with _token(folder / CHECKPOINTS) if env.rank() == 0 else nullcontext() as own:
        token = Path(rendezvous.share("token", str(own), str))
        report = collect(folder, token, cuda=kind == "cuda")
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
    with failure(f"cannot write to {path.parent}", OSError, hint="choose another folder with --out"):
        path.write_text(path.name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def problems(
    hosts: Sequence[HostfileEntry], reports: Sequence[HostReport | UnreachableHost], kind: DeviceKind
) -> list[str]:
    """Return the problems that would prevent a run, one line each."""
    ours, here, nics = local_host.versions(), socket.gethostname(), environment().get(NETWORK[0])
    lines = []
    for host, report in zip(hosts, reports, strict=True):
        if isinstance(report, UnreachableHost):
            lines.append(f"{host.name} {report.why}")
            continue
        lines += [
            f"{host.name} has {name} {report.versions.get(name)}; {here}, this machine, has {version}"
            for name, version in ours.items()
            if report.versions.get(name) != version
        ]
        lines += [
            f"{host.name} has DeepSpeed {version}, which computes wrong gradients (deepspeed#8224): "
            "pip install 'deepspeed>=0.19.6'"
            for version in [report.versions.get("deepspeed", "")]
            if (0,) < tuple(map(int, re.findall(r"\d+", version)[:3])) < (0, 19, 6)
        ]
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
                yield (
                    f"has {format_bytes(gpu.memory_bytes)} on GPU {number} ({gpu.name}), "
                    f"its line says {format_bytes(memory)}"
                )
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


def main() -> None:
    """Print this host's report."""
    given = parse(sys.argv[1:], {"folder": Path, "token": Path, "cuda": bool, "probe": bool})
    report = collect(given.get("folder", Path()), given.get("token"), cuda="cuda" in given, probe="probe" in given)
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
