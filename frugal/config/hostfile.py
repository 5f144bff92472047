"""A hostfile: the nodes of a cluster, one a line, as DeepSpeed's launcher reads them, and what each of them has.

    # NAME slots=GPUS   what the launcher needs; behind a `#` what only frugal reads
    node1 slots=4       # mem=12G gpu=rtx3060-12g host-mem=64G disk=500G
    node2 slots=2       # mem=24G,40G

`mem` and `gpu` have one value for all GPUs of the node, or one for each. DeepSpeed 0.19.8 reads a name and `slots=` and
nothing behind them; OpenMPI and MPICH end a line at `#`. So one file serves them all.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from frugal.errors import RequestError
from frugal.units import parse_bytes

_NAME = re.compile(r"\w[\w.@:-]*", re.ASCII)  # also an address, or user@host
KEYS = ("mem", "gpu", "host-mem", "disk")


@dataclass(frozen=True, kw_only=True)
class HostfileEntry:
    """One line: `slots` GPUs, memory and disk in bytes; None or empty where the line says nothing.

    `memory` and `cards` have one entry for all slots, or one for each.
    """

    name: str
    slots: int
    memory: tuple[int, ...] = ()
    cards: tuple[str, ...] = ()
    host_memory_bytes: int | None = None
    disk_bytes: int | None = None


def read_hostfile(path: Path) -> tuple[HostfileEntry, ...]:
    """The hosts in a file, in its order, which is that of the ranks.

    Raises:
        RequestError: it cannot be read, or a line is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(f"cannot read the hostfile {path}", because=str(why)) from None
    return parse_hostfile(text, source=str(path))


def parse_hostfile(text: str, *, source: str = "hostfile") -> tuple[HostfileEntry, ...]:
    """The hosts in the text of a hostfile; `source` names it in messages. Raises as `read`."""
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
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{place}: `{name}` is no name of a host", because="ssh and pdsh would take it for something else"
        )
    slots = words[0].removeprefix("slots=") if words and words[0].startswith("slots=") else ""
    if not slots.isdecimal() or int(slots) < 1:
        raise RequestError(
            f"{place}: `{line.strip()}` is no host",
            because="DeepSpeed's launcher needs a name and `slots=` with the number of GPUs, in this order",
            hint=f"{name} slots=4  # mem=12G",
        )
    given: dict[str, str] = {}
    for key, value in _pairs([*words[1:], *comment.split()]):
        if key not in KEYS:
            close = get_close_matches(key, KEYS, n=1)
            raise RequestError(
                f"{place}: unknown key `{key}`",
                because=f"a node can have {', '.join(KEYS)}",
                hint=f"did you mean `{close[0]}`?" if close else "leave it out",
            )
        if key in given:
            raise RequestError(f"{place}: `{key}` is given twice", hint="give one value for each GPU: mem=12G,24G")
        given[key] = value
    try:
        host = HostfileEntry(
            name=name,
            slots=int(slots),
            memory=tuple(map(parse_bytes, given["mem"].split(","))) if "mem" in given else (),
            cards=tuple(given["gpu"].split(",")) if "gpu" in given else (),
            host_memory_bytes=parse_bytes(given["host-mem"]) if "host-mem" in given else None,
            disk_bytes=parse_bytes(given["disk"]) if "disk" in given else None,
        )
    except RequestError as error:
        raise RequestError(f"{place}: {error.what}", because=error.because, hint=error.hint) from None
    for what, values in (("mem", host.memory), ("gpu", host.cards)):
        if len(values) not in (0, 1, host.slots):
            raise RequestError(
                f"{place}: `{what}` has {len(values)} values for {host.slots} slots",
                because="it has one for all GPUs of the node, or one for each",
            )
    return host


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """`key=value` words; others are left to people."""
    for word in words:
        key, is_pair, value = word.partition("=")
        if is_pair:
            yield key, value
