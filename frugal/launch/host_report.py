"""A report of this host, which `frugal doctor` and `frugal train --hostfile` collect from each host over ssh.

    python -m frugal.launch.host_report --folder run --token run/.token-1f2e --cuda

prints it as JSON. Each GPU is tried by a process of its own: one that has fallen off the bus may still be counted by
the driver, and a call to it may never return.
"""

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]  # has no types

from frugal.config.hardware import local_host
from frugal.config.schema import parse
from frugal.distributed.process_group import free_port
from frugal.units import MIB

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
            networks[name] = [f"{each.address}/{_prefix_length(each.netmask)}" for each in used]
    content = None
    if token is not None:
        with suppress(OSError):
            content = token.read_text()
    cuda_devices = _cuda_devices() if cuda else None
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
        gpus=_gpus() or (_gpus_of_torch() if cuda else []),
        driver=local_host.cuda_driver(),
        cuda_devices=cuda_devices,
        working_gpus=[int(name) for name in working_gpus([*map(str, range(cuda_devices or 0))])] if probe else None,
        compilers=_compilers(),
        token=content,
        free_port=free_port(),
    )


def _prefix_length(netmask: str | None) -> int:
    return int(ip_address(netmask or "255.255.255.255")).bit_count()


def _gpus() -> list[Gpu]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    gpus = []
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        for line in subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines():
            name, total, free = (word.strip() for word in line.rsplit(",", 2))
            gpus.append(Gpu(name, int(total) * MIB, int(free) * MIB))
    return gpus


def _gpus_of_torch() -> list[Gpu]:
    """Return the GPUs that torch finds, as in a container without nvidia-smi."""
    import torch

    gpus = []
    with suppress(RuntimeError):  # a driver that does not work is reported by `working_gpus`
        for number in range(torch.cuda.device_count()):
            free_bytes, total_bytes = torch.cuda.mem_get_info(number)
            gpus.append(Gpu(torch.cuda.get_device_properties(number).name, total_bytes, free_bytes))
    return gpus


def _cuda_devices() -> int:
    import torch  # takes seconds: only where a plan is for GPUs

    return torch.cuda.device_count()


def _compilers() -> dict[str, str]:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")
    paths = {"c++": shutil.which(os.environ.get("CXX", "c++")), "nvcc": nvcc, "ninja": shutil.which("ninja")}
    return {name: path for name, path in paths.items() if path is not None}


def command(words: Sequence[str]) -> None:
    """Print this host's report."""
    given = parse(words, {"folder": Path, "token": Path, "cuda": bool, "probe": bool})
    report = collect(given.get("folder", Path()), given.get("token"), cuda="cuda" in given, probe="probe" in given)
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")


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


if __name__ == "__main__":
    command(sys.argv[1:])
