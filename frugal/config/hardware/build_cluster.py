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
from pathlib import Path

from frugal import files
from frugal.config.hardware import cluster
from frugal.config.hardware.calibration import Calibration
from frugal.config.hardware.cluster import CARDS, MOST_RANKS, Card, Cluster, DeviceKind, Node
from frugal.config.request import Precision
from frugal.config.setting import SIZE, SIZES, check_sizes, setting
from frugal.errors import RequestError, failure, refuse
from frugal.units import MIB, parse_bytes

_NAME = re.compile(r"(\w[\w.-]*@)?(\w[\w.-]*|[\da-fA-F]*:[\da-fA-F]*:[\da-fA-F:.]*(%\w[\w.-]*)?)", re.ASCII)
"""A host's name or address, maybe with a user; two colons are in every address of IPv6, and in no name with a port."""

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
    with failure(f"cannot read the hostfile {path}", OSError, ValueError):
        text = files.without_bom(path.read_bytes()).decode()
    return parse_hostfile(text, source=str(path))


def parse_hostfile(text: str, *, source: str = "hostfile") -> tuple[HostfileEntry, ...]:
    """Return the hosts in the text of a hostfile; `source` names it in messages. Raises as `read_hostfile`."""
    hosts: dict[str, tuple[int, HostfileEntry]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            host = _host(line)
            if host.name in hosts:
                raise RequestError(
                    f"{host.name} is there twice",
                    because=f"line {hosts[host.name][0]} names it too, and DeepSpeed's launcher refuses that",
                    hint="give it one line with all its slots",
                )
        except RequestError as error:
            place = f"{source}, line {number}"
            raise RequestError(f"{place}: {error.what}", because=error.because, hint=error.hint) from None
        hosts[host.name] = (number, host)
    refuse((not hosts, f"{source} names no host", "", "write a line `NAME slots=GPUS` for each node"))
    return tuple(host for _, host in hosts.values())


def _host(line: str) -> HostfileEntry:
    launcher, _, comment = line.partition("#")
    name, *words = launcher.split()
    name = re.sub(r"\[([\da-fA-F:.%\w-]+)\]$", r"\1", name)  # [2001:db8::1], as URLs have it
    slots = words[0].removeprefix("slots=") if words and words[0].startswith("slots=") else ""
    pairs = [word.split("=", 1) for word in (*words[1:], *comment.split()) if "=" in word]
    given = {key: value.split(",") for key, value in pairs}  # other words are comments for people
    unknown = next((key for key in given if key not in KEYS), "")
    close = next(iter(get_close_matches(unknown, KEYS, n=1)), "")
    num_slots = int(slots) if slots.isdecimal() else 0
    uneven = next((key for key in ("mem", "gpu") if len(given.get(key, ())) not in (0, 1, num_slots)), "")
    several = next((key for key in ("host-mem", "disk") if len(given.get(key, ())) > 1), "")
    refuse(
        (not _NAME.fullmatch(name), f"`{name}` is no name of a host", "ssh would take it for something else", None),
        (
            num_slots < 1,
            f"`{line.strip()}` is no host",
            "DeepSpeed's launcher needs a name and `slots=` with the number of GPUs, in this order",
            f"{name} slots=4  # mem=12G",
        ),
        (
            unknown,
            f"unknown key `{unknown}`",
            f"a node can have {', '.join(KEYS)}",
            f"did you mean `{close}`?" if close else "leave it out",
        ),
        (len(given) < len(pairs), "a key is given twice", "", "give one value for each GPU: mem=12G,24G"),
        (
            uneven,
            f"`{uneven}` has {len(given.get(uneven, ()))} values for {slots} slots",
            "it has one for all GPUs of the node, or one for each",
            None,
        ),
        (several, f"`{several}` has several values", "it is that of the whole node", None),
    )
    amounts = {key: tuple(map(parse_bytes, values)) for key, values in given.items() if key != "gpu"}
    return HostfileEntry(
        name=name,
        slots=num_slots,
        memory=amounts.get("mem", ()),
        cards=tuple(given.get("gpu", ())),
        host_memory_bytes=next(iter(amounts.get("host-mem", ())), None),
        disk_bytes=next(iter(amounts.get("disk", ())), None),
    )


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
    if settings.hostfile is None:
        hosts: tuple[HostfileEntry, ...] = (_each_node(settings),)
    else:
        given = next((name for name in ("gpus", "nodes") if getattr(settings, name) is not None), "")
        refuse(
            (
                given,
                f"--{given} was given together with --hostfile",
                "the hostfile says how many there are",
                "leave one of them out",
            )
        )
        hosts = read_hostfile(Path(settings.hostfile))
    num_nodes = settings.nodes or 1
    world_size = num_nodes * sum(host.slots for host in hosts)
    refuse(
        (
            world_size > MOST_RANKS,
            f"{world_size:,} GPUs are more than frugal plans for",
            f"a plan names every GPU, and can do so for {MOST_RANKS:,}",
            None,
        )
    )
    kinds, links = {}, []
    for host in dict.fromkeys(replace(host, name="") for host in hosts):
        node = _node(host, settings, precision, world_size, unnamed)
        for device in node.devices:
            card_link = cluster.CARDS.get(device.name, cluster.GENERIC).link_bandwidth
            links.append(cluster.CPU_LINK_BANDWIDTH if device.kind == "cpu" else card_link)
        if calibration is not None:
            measured_devices = tuple(
                calibration.apply(device, precision, num_ranks=world_size, ranks_per_node=host.slots)
                for device in node.devices
            )
            node = replace(node, devices=measured_devices)
        kinds[host] = node
    measured = None if calibration is None else calibration.probe.link_bandwidth
    return Cluster(
        nodes=tuple(kinds[replace(host, name="")] for host in hosts) * num_nodes,
        intra_bandwidth=min(links) if measured is None else measured,
        inter_bandwidth=cluster.INTER_NODE_BANDWIDTH,
        links_measured=measured is not None,
        **({} if calibration is None else calibration.of_cluster()),
    )


def _each_node(settings: ClusterSettings) -> HostfileEntry:
    """Return the node that flags describe."""
    numbers = {"mem": len(_memory(settings.mem)), "gpu": len(_names(settings.gpu))}
    several = {name: number for name, number in numbers.items() if number > 1}
    num_gpus = settings.gpus or next(iter(several.values()), 0)
    wrong = next((name for name, number in several.items() if number != num_gpus), "")
    number = "" if num_gpus else " --gpus 4"
    refuse(
        (
            settings.mem is None and settings.device == "cpu",
            "the memory of a CPU rank is not known",
            "--mem was not given",
            f"add{number} --mem 2G",
        ),
        (
            settings.mem is None and settings.gpu is None,
            "the memory of a GPU is not known",
            "--mem was not given, and no GPU was found here",
            f"add{number} --mem 12G",
        ),
        (
            not num_gpus,
            "the number of GPUs is not known",
            "--gpus was not given, and no GPU was found here",
            f"add{number}",
        ),
        (
            wrong,
            f"--gpus {num_gpus} does not go with {several.get(wrong)} values of --{wrong}",
            "it has one for all GPUs of a node, or one for each",
            None,
        ),
    )
    return HostfileEntry(name="", slots=num_gpus)


def _node(host: HostfileEntry, settings: ClusterSettings, precision: Precision, world_size: int, unnamed: Card) -> Node:
    """Return the devices and memory of a host; flags fill in what its line does not say."""
    given = tuple((size, 0) for size in host.memory) or _memory(settings.mem) or ((None, 0),)
    names: tuple[str | None, ...] = host.cards or _names(settings.gpu) or (None,)
    host_memory = _memory(settings.host_mem)
    wrong, number = next(
        ((name, len(each)) for name, each in (("mem", given), ("gpu", names)) if len(each) not in (1, host.slots)),
        ("", 0),
    )
    refuse(
        (
            wrong,
            f"--{wrong} has {number} values, for {host.slots} slots of a node",
            "it has one for all GPUs of a node, or one for each",
            f"write `{wrong}` behind the slots of each line",
        ),
        (len(host_memory) > 1, f"`host-mem` names {len(host_memory)} amounts", "all nodes are alike", "give one: 64G"),
    )
    devices = []
    for slot in range(host.slots):
        size, held = given[slot % len(given)]
        name = names[slot % len(names)]
        if settings.device == "cpu":
            if size is None:
                raise RequestError(
                    "--gpu names a card, but --device is cpu", hint="give the budget of a CPU rank: --mem 2G"
                )
            device = cluster.cpu_rank(size)
        else:
            refuse(
                (
                    size is None and name is None,
                    "the memory of a GPU is not known",
                    "neither a line of the hostfile nor --mem says it",
                    "write it behind the slots: NAME slots=4  # mem=12G",
                )
            )
            card = unnamed if name is None else cluster.find_card(name)
            device = card.device(precision, num_gpus=world_size, memory_bytes=size)
        devices.append(replace(device, held_bytes=held))
    return Node(
        devices=tuple(devices),
        host_memory_bytes=host.host_memory_bytes or next((size for size, _ in host_memory), None),
        host_disk_bytes=host.disk_bytes,
    )


def _names(value: str | None) -> tuple[str, ...]:
    return () if value is None else tuple(name.strip() for name in value.split(","))


def _memory(value: Amounts | None) -> tuple[tuple[int, int], ...]:
    """Return the bytes of each amount in `value`, and those of it that other processes hold: 2 GiB of `24G-2G`."""
    amounts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value or ()
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
