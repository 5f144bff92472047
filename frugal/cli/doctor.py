"""`frugal doctor`."""

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import get_args

import click

from frugal.cli.terminal import print_json
from frugal.config.hardware import build_cluster
from frugal.config.hardware.build_cluster import HostfileEntry
from frugal.config.hardware.cluster import DeviceKind
from frugal.config.run_settings import RunSettings
from frugal.config.schema import read_toml
from frugal.distributed import env
from frugal.errors import RequestError, refuse
from frugal.launch import host_report
from frugal.launch.host_report import HostReport, UnreachableHost
from frugal.units import format_bytes

NOT_READY = RequestError.exit_code


@click.command("doctor")
@click.option("--hostfile", "path", type=click.Path(path_type=Path), help="Ask each of its hosts over ssh.")
@click.option("--out", type=click.Path(path_type=Path), help=f"The run's folder.  [default: {RunSettings.out}]")
@click.option("--device", type=click.Choice(get_args(DeviceKind)), help="What the run is for.  [default: cuda]")
@click.option("--config", "file", type=click.Path(path_type=Path), help="Settings file.  [default: frugal.toml]")
@click.option("--json", "as_json", is_flag=True, help="Print it for programs.")
@click.option("--print", "is_printed", is_flag=True, help="Without ssh: print what to run on the hostfile's hosts.")
def command(
    path: Path | None, out: Path | None, device: str | None, file: Path | None, as_json: bool, is_printed: bool
) -> int:  # fmt: skip
    """Check this machine, or each host of a hostfile, for problems that would prevent a run (exit code 2).

    Started on each of several hosts, as by `srun --ntasks-per-node 1 frugal doctor`, the first one reports of all.
    """
    settings = read_toml(file)
    path = path or (Path(settings["hostfile"]) if "hostfile" in settings else None)
    kind: DeviceKind = "cpu" if (device or settings.get("device")) == "cpu" else "cuda"
    folder = out or Path(settings.get("out", RunSettings.out))
    named: Sequence[HostfileEntry] = () if path is None else build_cluster.read_hostfile(path)
    if is_printed:
        refuse((not named, "--print needs a hostfile", "its lines name the hosts", "--hostfile HOSTS"))
        click.echo(
            host_report.lines_without_ssh([host.name for host in named], ["--out", str(folder), "--device", kind])
        )
        return 0
    env.adopt_launcher_variables()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        named, reports = host_report.collect_from_ranks(folder, kind)
        if not named:  # rank 0 has them
            return 0
    elif named:
        reports = host_report.collect_reports(named, folder, kind)
    else:
        here = host_report.collect(folder, None, cuda=kind == "cuda")
        named, reports = [HostfileEntry(name=here.host, slots=1)], [here]
    problems = host_report.problems(named, reports, kind)
    if as_json:
        by_host = {
            host.name: {"why": report.why} if isinstance(report, UnreachableHost) else report
            for host, report in zip(named, reports, strict=True)
        }
        print_json({"hosts": by_host, "problems": problems})
    else:
        for host, report in zip(named, reports, strict=True):
            click.echo("\n".join(_table(host, report, folder, is_shared=len(named) > 1)) + "\n")
        click.echo(
            "\n".join(["what would stop a run", *(f"  {text}" for text in problems)] if problems else ["all is well"])
        )
    return NOT_READY if problems else 0


def _table(
    host: HostfileEntry, report: HostReport | UnreachableHost, folder: Path, *, is_shared: bool
) -> Iterator[str]:
    """Yield the lines about one host."""
    if isinstance(report, UnreachableHost):
        yield host.name
        yield f"  reached    no: {report.why}"
        return
    yield host.name if report.host == host.name else f"{host.name} ({report.host})"
    if report.address:
        yield f"  reached    at {report.address}"
    versions = {"python": report.python, **report.versions}
    yield f"  versions   {', '.join(f'{name} {version}' for name, version in versions.items())}"
    kinds = []
    for (name, memory), gpus in groupby(report.gpus, lambda gpu: (gpu.name, gpu.memory_bytes)):
        free = [format_bytes(gpu.free_bytes) for gpu in gpus]
        kinds.append(f"{len(free)} x {name} with {format_bytes(memory)}, free {', '.join(free)}")
    if kinds and report.driver:
        kinds.append(f"driver {report.driver}")
    if kinds and report.cuda_devices is not None:
        kinds.append(f"torch can use {report.cuda_devices}")
    yield f"  GPUs       {'; '.join(kinds) or 'none by nvidia-smi or torch'}"
    left, total = format_bytes(report.free_memory_bytes), format_bytes(report.memory_bytes)
    yield f"  host       {left} of {total} of memory free, {report.cores} cores"
    shared = ", which all hosts see" if is_shared else ""
    yield f"  disk       {format_bytes(report.free_disk_bytes)} free for {folder}{shared}"
    networks = [f"{nic} {' '.join(at)}" for nic, at in report.networks.items()]
    yield f"  network    {', '.join(networks) or 'none but loopback'}"
    missing = [name for name in ("c++", "nvcc", "ninja") if name not in report.compilers]
    has = ", ".join(report.compilers.values()) or "none"
    without = f"; no {', '.join(missing)}: DeepSpeed's own operators cannot be compiled, NVMe needs them"
    yield f"  compilers  {has}{without if missing else ''}"
