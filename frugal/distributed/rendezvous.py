"""The rendezvous of all ranks before they form a process group: which are missing, and which differ from rank 0.

A process group says nothing of missing ranks until its timeout, and one between different versions of torch may fail
anywhere. So every rank first describes itself in the store at MASTER_ADDR:MASTER_PORT; rank 0 compares all descriptions
and writes its verdict there, which all ranks follow. The process group later shares that store's port.
"""

import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from frugal.config.local_host import versions
from frugal.distributed import rank_logs
from frugal.errors import PlanMismatchError, RequestError
from frugal.planning.plan import Plan

WAIT_SECONDS = 300.0
"""Until a missing rank is given up. On a node with a slow disk ranks take a minute to start."""

NOTICE_SECONDS = 30.0
"""Until rank 0 says whom it waits for."""

_VERDICT = "frugal/verdict"

_store: TCPStore | None = None  # kept: the process group's store lives on the same server


class RankDescription(msgspec.Struct):
    """One rank: its host's name, the versions installed there, the digest of its plan."""

    host: str
    versions: dict[str, str]
    digest: str


@dataclass(frozen=True)
class _Verdict:
    """Why the run cannot start, as the parts of an error message."""

    what: str
    because: tuple[str, ...]
    hint: str


def store() -> TCPStore | None:
    """The store of this rank's rendezvous; None before one."""
    return _store


def rendezvous(plan: Plan, *, wait_seconds: float = WAIT_SECONDS) -> None:
    """Wait for all ranks of the environment's world, and compare them with rank 0. Collective.

    Raises:
        PlanMismatchError: some have other versions, or another plan.
        RequestError: some are missing after `wait_seconds`, or the port is in use.
    """
    global _store
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _store = _connect(rank, wait_seconds)
    own = RankDescription(socket.gethostname(), versions(), plan.digest)
    _store.set(_key(rank), msgspec.json.encode(own).decode())
    if rank == 0:
        if missing := _wait_for_all(_store, world_size, wait_seconds):
            verdict: _Verdict | None = _missing_ranks(missing, plan, wait_seconds)
        else:
            ranks = range(world_size)
            verdict = compare([msgspec.json.decode(_store.get(_key(rank)), type=RankDescription) for rank in ranks])
        _store.set(_VERDICT, msgspec.json.encode(verdict).decode())
    else:
        verdict = _read_verdict(_store, wait_seconds)
    if verdict is not None:
        kind = RequestError if verdict.what.startswith("not all") else PlanMismatchError
        raise kind(verdict.what, because=verdict.because, hint=verdict.hint)


def compare(ranks: Sequence[RankDescription]) -> _Verdict | None:
    """How ranks differ from rank 0, in rank order; None if they do not."""
    because = []
    for name, version_of_rank_0 in ranks[0].versions.items():
        versions_by_rank = [rank.versions.get(name, "none") for rank in ranks]
        if set(versions_by_rank) != {version_of_rank_0}:
            holders = _holders(ranks, versions_by_rank)
            because.append("; ".join(f"{where} has {name} {version}" for version, where in holders.items()))
    if because:
        return _Verdict(
            "the hosts do not run the same versions", tuple(because),
            "install the same on all; `frugal doctor --hostfile HOSTS` shows what each has",
        )  # fmt: skip
    if any(rank.digest != ranks[0].digest for rank in ranks):
        holders = _holders(ranks, [rank.digest for rank in ranks])
        because = [f"{where} holds plan {digest[:12]}" for digest, where in holders.items()]
        return _Verdict("the ranks were given different plans", tuple(because), "give every node the same plan.json")
    return None


def _holders(ranks: Sequence[RankDescription], values: Sequence[str]) -> dict[str, str]:
    """Who has each of the ranks' values: hosts, and their ranks."""
    ranks_by_value: dict[str, dict[str, list[int]]] = {}
    for number, (rank, value) in enumerate(zip(ranks, values, strict=True)):
        ranks_by_value.setdefault(value, {}).setdefault(rank.host, []).append(number)
    return {
        value: ", ".join(f"{host} ({ranks_in_words(numbers)})" for host, numbers in hosts.items())
        for value, hosts in ranks_by_value.items()
    }


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-3`, `ranks 0-3, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if len(runs) == 1 and runs[0][0] == runs[0][1] else 's'} {words}"


def _connect(rank: int, wait_seconds: float) -> TCPStore:
    """The store, which rank 0 serves unless torchrun does."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(
            address, port, is_master=serves, timeout=timedelta(seconds=wait_seconds), wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    except DistNetworkError as error:
        if serves:
            if "EADDRINUSE" not in str(error):
                raise
            raise RequestError(f"port {port} is in use", hint="choose another port with --master-port") from None
        raise RequestError(
            f"{socket.gethostname()} does not reach rank 0 at {address}:{port}",
            because=f"it tried for {wait_seconds:.0f} s: {str(error).splitlines()[0]}",
            hint="is rank 0 running, and does a firewall let the port through? --nic names the network to use",
        ) from None


def _wait_for_all(store: TCPStore, world_size: int, seconds: float) -> list[int]:
    """Wait for all ranks' descriptions; the ranks that are missing in the end."""
    start, is_noticed = time.monotonic(), False
    while True:
        try:
            store.wait([_key(rank) for rank in range(world_size)], timedelta(seconds=min(NOTICE_SECONDS, seconds)))
            return []
        except DistStoreError:
            missing = [rank for rank in range(world_size) if not store.check([_key(rank)])]
            if time.monotonic() - start >= seconds:
                return missing
            if missing and not is_noticed:
                is_noticed = True
                rank_logs.to_console(f"waiting for {ranks_in_words(missing)}")


def _missing_ranks(missing: list[int], plan: Plan, seconds: float) -> _Verdict:
    because, first = [], 0
    for number, node in enumerate(plan.cluster.nodes):
        ranks = [rank for rank in missing if first <= rank < first + len(node.devices)]
        first += len(node.devices)
        if ranks:
            because.append(f"node {number} of the plan: {ranks_in_words(ranks)}")
    return _Verdict(
        f"not all ranks came within {seconds:.0f} s", tuple(because),
        "start the command on every node; what these ranks said is in logs/ of the run's folder on their host",
    )  # fmt: skip


def _read_verdict(store: TCPStore, seconds: float) -> _Verdict | None:
    try:
        store.wait([_VERDICT], timedelta(seconds=seconds + NOTICE_SECONDS))
        return msgspec.json.decode(store.get(_VERDICT), type=_Verdict | None)
    except (DistStoreError, DistNetworkError):
        raise RuntimeError("Connection to rank 0 was lost before all ranks had come") from None


def _key(rank: int) -> str:
    """Under which a rank describes itself in the store."""
    return f"frugal/rank/{rank}"
