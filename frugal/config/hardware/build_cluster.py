"""Settings to a cluster: flags describe nodes that are all alike, a hostfile nodes that may differ.

A hostfile names one node a line, as DeepSpeed's launcher reads them, and what each of them has:

    # NAME slots=GPUS   what the launcher needs; behind a `#` what only frugal reads
    node1 slots=4       # mem=12G gpu=rtx3060-12g host-mem=64G disk=500G
    node2 slots=2       # mem=24G,40G

`mem` and `gpu` have one value for all GPUs of the node, or one for each. DeepSpeed 0.19.8 reads a name and `slots=` and
nothing behind them; OpenMPI and MPICH end a line at `#`. So one file serves them all.
"""

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from frugal import files
from frugal.config.hardware import cluster
from frugal.config.hardware.calibration import Calibration
from frugal.config.hardware.cluster import CARDS, MOST_RANKS, Card, Cluster, Device, DeviceKind, Node
from frugal.config.request import Precision
from frugal.config.setting import SIZE, SIZES, check_sizes, setting
from frugal.errors import RequestError, refuse
from frugal.units import MIB, parse_bytes, plural

_NAME = re.compile(r"(\w[\w.-]*@)?(\w[\w.-]*|[\da-fA-F:.]+(%\w[\w.-]*)?)", re.ASCII)  # also an address, or user@host
KEYS = ("mem", "gpu", "host-mem", "disk")


@dataclass(frozen=True, kw_only=True)
class HostfileEntry:
    """One line: `slots` GPUs, memory and disk in bytes; None or empty if not given.

    `memory` and `cards` have one entry for all slots, or one for each.
    """

    name: str
    slots: int
    memory: tuple[int, ...] = ()
    cards: tuple[str, ...] = ()
    host_memory_bytes: int | None = None
    disk_bytes: int | None = None


def read_hostfile(path: Path) -> tuple[HostfileEntry, ...]:
    """Return the hosts in a file, in its order, which is that of the ranks.

    Raises:
        RequestError: it cannot be read, or a line is wrong.
    """
    try:
        text = files.without_bom(path.read_bytes()).decode()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(f"cannot read the hostfile {path}", because=str(why)) from None
    return parse_hostfile(text, source=str(path))


def parse_hostfile(text: str, *, source: str = "hostfile") -> tuple[HostfileEntry, ...]:
    """Return the hosts in the text of a hostfile; `source` names it in messages. Raises as `read_hostfile`."""
    hosts: dict[str, tuple[int, HostfileEntry]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        host = _host(line, f"{source}, line {number}")
        if host.name in hosts:
            raise RequestError(
                f"{source}, line {number}: {host.name} is there twice",
                because=f"line {hosts[host.name][0]} names it too, and DeepSpeed's launcher refuses that",
                hint="give it one line with all its slots",
            )
        hosts[host.name] = (number, host)
    if not hosts:
        raise RequestError(f"{source} names no host", hint="write a line `NAME slots=GPUS` for each node")
    return tuple(host for _, host in hosts.values())


def _host(line: str, place: str) -> HostfileEntry:
    launcher, _, comment = line.partition("#")
    name, *words = launcher.split()
    name = re.sub(r"\[([\da-fA-F:.%\w-]+)\]$", r"\1", name)  # [2001:db8::1], as URLs have it
    slots = words[0].removeprefix("slots=") if words and words[0].startswith("slots=") else ""
    pairs = [
        (key, value)
        for key, has_value, value in (word.partition("=") for word in (*words[1:], *comment.split()))
        if has_value
    ]
    given = dict(pairs)  # other words are comments for people
    unknown = next((key for key in given if key not in KEYS), "")
    close = next(iter(get_close_matches(unknown, KEYS, n=1)), "")
    refuse(
        (
            not _NAME.fullmatch(name) or not _has_no_port(name.rpartition("@")[2]),
            f"{place}: `{name}` is no name of a host",
            "ssh would take it for something else",
            None,
        ),
        (
            not slots.isdecimal() or int(slots) < 1,
            f"{place}: `{line.strip()}` is no host",
            "DeepSpeed's launcher needs a name and `slots=` with the number of GPUs, in this order",
            f"{name} slots=4  # mem=12G",
        ),
        (
            unknown,
            f"{place}: unknown key `{unknown}`",
            f"a node can have {', '.join(KEYS)}",
            f"did you mean `{close}`?" if close else "leave it out",
        ),
        (
            len(given) < len(pairs),
            f"{place}: a key is given twice",
            "",
            "give one value for each GPU: mem=12G,24G",
        ),
    )
    try:
        amounts = {key: tuple(map(parse_bytes, value.split(","))) for key, value in given.items() if key != "gpu"}
    except RequestError as error:
        raise RequestError(f"{place}: {error.what}", because=error.because, hint=error.hint) from None
    cards = tuple(given["gpu"].split(",")) if "gpu" in given else ()
    several = {"mem": len(amounts.get("mem", ())), "gpu": len(cards)}
    refuse(
        *(
            (
                number not in (0, 1, int(slots)),
                f"{place}: `{what}` has {number} values for {slots} slots",
                "it has one for all GPUs of the node, or one for each",
                None,
            )
            for what, number in several.items()
        ),
        *(
            (
                len(amounts.get(what, ())) > 1,
                f"{place}: `{what}` has several values",
                "it is that of the whole node",
                None,
            )
            for what in ("host-mem", "disk")
        ),
    )
    return HostfileEntry(
        name=name,
        slots=int(slots),
        memory=amounts.get("mem", ()),
        cards=cards,
        host_memory_bytes=next(iter(amounts.get("host-mem", ())), None),
        disk_bytes=next(iter(amounts.get("disk", ())), None),
    )


def _has_no_port(host: str) -> bool:
    """Return whether a host has no colons but those of an IPv6 address."""
    try:
        return ":" not in host or bool(ip_address(host))
    except ValueError:
        return False


Amounts = str | int | list[str | int] | tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Hardware to run on, as flags describe it: nodes that are all alike, or a hostfile's."""

    gpus: int | None = setting(
        None, "GPUs of one node (with --device cpu: ranks).", "hardware", least=1, is_first=True,
        shown_default="those of this machine",
    )  # fmt: skip
    nodes: int | None = setting(None, "Nodes, all alike.", "hardware", least=1, shown_default="1", is_expert=True)
    mem: Amounts | None = setting(
        None, "Memory of each GPU, such as 12G (12 GiB), or 12G-2G if others hold 2 GiB of it; or one size for each.",
        "hardware", kind=SIZES, is_first=True, metavar="SIZE[,SIZE...]",
        shown_default="what this machine's have",
    )  # fmt: skip
    hostfile: str | None = setting(
        None, "Nodes that differ: `NAME slots=GPUS # mem=12G gpu=CARD host-mem=64G disk=1T`.", "hardware",
        metavar="FILE",
    )  # fmt: skip
    gpu: str | None = setting(
        None, f"A known card instead of --mem, or one for each: {', '.join(CARDS)}.", "hardware",
        metavar="CARD[,CARD...]",
    )  # fmt: skip
    host_mem: str | int | None = setting(
        None, "Memory of a node's host, to check plans against.", "hardware", kind=SIZE, metavar="SIZE",
        is_expert=True,
    )  # fmt: skip
    device: DeviceKind | None = setting(None, "Device type.", "hardware", shown_default="cuda")

    def __post_init__(self) -> None:
        check_sizes(self)


def build_cluster(
    settings: ClusterSettings, precision: Precision, calibration: Calibration | None, unnamed: Card = cluster.GENERIC
) -> Cluster:
    """Return the cluster that settings describe. A line of a hostfile wins over a flag.

    `unnamed` stands for GPUs whose card is not named.

    Raises:
        RequestError: it is not known how many GPUs there are or how large they are, or settings contradict each other.
    """
    hosts = _alike(settings) if settings.hostfile is None else _of_hostfile(settings, Path(settings.hostfile))
    world_size = sum(host.slots for host in hosts)
    kinds = {
        host: _node(host, settings, precision, world_size, unnamed)
        for host in {replace(host, name="") for host in hosts}
    }
    links = [_link(device) for node in kinds.values() for device in node.devices]
    measured = None
    if calibration is not None:
        measured = calibration.probe.link_bandwidth
        kinds = {
            host: replace(
                node,
                devices=tuple(
                    calibration.apply(device, precision, num_ranks=world_size, ranks_per_node=host.slots)
                    for device in node.devices
                ),
            )
            for host, node in kinds.items()
        }
    return Cluster(
        nodes=tuple(kinds[replace(host, name="")] for host in hosts),
        intra_bandwidth=min(links) if measured is None else measured,
        inter_bandwidth=cluster.INTER_NODE_BANDWIDTH,
        links_measured=measured is not None,
        **({} if calibration is None else calibration.of_cluster()),
    )


def _of_hostfile(settings: ClusterSettings, path: Path) -> tuple[HostfileEntry, ...]:
    given = next((name for name in ("gpus", "nodes") if getattr(settings, name) is not None), "")
    if given:
        raise RequestError(
            f"--{given} was given together with --hostfile",
            because="the hostfile says how many there are",
            hint="leave one of them out",
        )
    hosts = read_hostfile(path)
    total = sum(host.slots for host in hosts)
    if total > MOST_RANKS:
        raise RequestError(f"{path} has {total} GPUs, which {_TOO_MANY}", because=_WHY_TOO_MANY)
    return hosts


_TOO_MANY = "is more than frugal plans for"
_WHY_TOO_MANY = f"a plan names every GPU, and can do so for {MOST_RANKS:,}"


def _alike(settings: ClusterSettings) -> tuple[HostfileEntry, ...]:
    """Return the nodes that flags describe."""
    num_nodes = settings.nodes or 1
    numbers = {"mem": len(_memory(settings.mem)), "gpu": len(_names(settings.gpu))}
    several = {name: number for name, number in numbers.items() if number > 1}
    num_gpus = settings.gpus or next(iter(several.values()), 0)
    wrong = next((name for name, number in several.items() if number != num_gpus), "")
    what = {"mem": "amounts of memory", "gpu": "cards"}.get(wrong)
    refuse(
        (
            (settings.gpus or 1) * num_nodes > MOST_RANKS,
            f"{plural(num_nodes, 'node')} with {settings.gpus or 1} GPUs {_TOO_MANY}",
            _WHY_TOO_MANY,
            None,
        ),
        (
            settings.mem is None and settings.device == "cpu",
            "the memory of a CPU rank is not known",
            "--mem was not given",
            f"frugal plan --device cpu --gpus {settings.gpus or 2} --mem 2G",
        ),
        (
            settings.mem is None and settings.gpu is None,
            "the memory of a GPU is not known",
            "--mem was not given, and no GPU was found here",
            "frugal plan --gpus 4 --mem 12G",
        ),
        (
            not num_gpus,
            "the number of GPUs is not known",
            "--gpus was not given, and no GPU was found here",
            "frugal plan --gpus 4 --mem 12G",
        ),
        (
            wrong,
            f"--gpus {num_gpus} does not go with {several.get(wrong)} {what}",
            f"--{wrong} names one {'card' if wrong == 'gpu' else 'amount'} for all GPUs of a node, or one for each",
            None,
        ),
    )
    return (HostfileEntry(name="", slots=num_gpus),) * num_nodes


def _node(host: HostfileEntry, settings: ClusterSettings, precision: Precision, world_size: int, unnamed: Card) -> Node:
    """Return the devices and memory of a host; flags fill in what its line does not say."""
    where = f"{host.slots} slots of a node" if settings.hostfile is not None else ""
    given = tuple((size, 0) for size in host.memory) or _memory(settings.mem)
    memory = _for_each(given, host.slots, "mem", where)
    names = _for_each(host.cards or _names(settings.gpu), host.slots, "gpu", where)
    host_memory = _memory(settings.host_mem)
    if len(host_memory) > 1:
        raise RequestError(
            f"`host-mem` names {len(host_memory)} amounts", because="all nodes are alike", hint="give one: 64G"
        )
    return Node(
        devices=tuple(
            replace(_device(settings, precision, world_size, unnamed, size, name), held_bytes=held)
            for (size, held), name in ((each or (None, 0), name) for each, name in zip(memory, names, strict=True))
        ),
        host_memory_bytes=host.host_memory_bytes or next((size for size, _ in host_memory), None),
        host_disk_bytes=host.disk_bytes,
    )


def _device(
    settings: ClusterSettings,
    precision: Precision,
    world_size: int,
    unnamed: Card,
    memory: int | None,
    name: str | None,
) -> Device:
    if settings.device == "cpu":
        if memory is None:
            raise RequestError(
                "--gpu names a card, but --device is cpu", hint="give the budget of a CPU rank: --mem 2G"
            )
        return cluster.cpu_rank(memory)
    if memory is None and name is None:
        raise RequestError(
            "the memory of a GPU is not known",
            because="neither a line of the hostfile nor --mem says it",
            hint="write it behind the slots: NAME slots=4  # mem=12G",
        )
    card = unnamed if name is None else cluster.find_card(name)
    return card.device(precision, num_gpus=world_size, memory_bytes=memory)


def _link(device: Device) -> float:
    """Return the bytes/s between two such devices of a node."""
    if device.kind == "cpu":
        return cluster.CPU_LINK_BANDWIDTH
    return cluster.CARDS.get(device.name, cluster.GENERIC).link_bandwidth


def _for_each(values: tuple[Any, ...], slots: int, name: str, where: str) -> tuple[Any, ...]:
    """Return one value per slot, from one for all, one for each, or none."""
    if len(values) in (0, 1):
        return (values or (None,)) * slots
    if len(values) != slots:
        raise RequestError(
            f"--{name} has {len(values)} values, for {where}",
            because="it has one for all GPUs of a node, or one for each",
            hint=f"write `{name}` behind the slots of each line",
        )
    return values


def _names(value: str | None) -> tuple[str, ...]:
    return () if value is None else tuple(name.strip() for name in value.split(","))


def _memory(value: Amounts | None) -> tuple[tuple[int, int], ...]:
    """Return the bytes of each amount in `value`, and those of it that other processes hold: 2 GiB of `24G-2G`."""
    if value is None:
        return ()
    amounts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
    parts = [each.partition("-") if isinstance(each, str) else (each, "", "") for each in amounts]
    return tuple((_amount(size), _amount(held) if is_held else 0) for size, is_held, held in parts)


def _amount(value: str | int) -> int:
    if isinstance(value, int) and 0 < value < MIB:
        raise RequestError(
            f"{value} is an amount of memory in bytes, and hardly meant so",
            hint=f'write it with its unit: "{value}G"',
        )
    if isinstance(value, int) or (value.isdecimal() and int(value) >= MIB):
        return int(value)
    return parse_bytes(value)
