"""Ranks introduce themselves before they form a process group: who is missing, and who is not like the others.

A process group that is waited for says nothing until its timeout, and one between different versions of torch may fail
anywhere. So every rank first leaves a card in the store at MASTER_ADDR:MASTER_PORT; rank 0 reads them all and leaves
its verdict, which all ranks follow. The process group later shares that store's port.
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
"""Until a rank that has not come is given up. A node's ranks are on their way for a minute if its disk is slow."""

SAY_SECONDS = 30.0
"""Until rank 0 says whom it waits for."""

_store: TCPStore | None = None  # kept: the process group's store lives on the same server


class RankDescription(msgspec.Struct):
    """One rank: its host's name, the versions there, the digest of its plan."""

    host: str
    versions: dict[str, str]
    digest: str


@dataclass(frozen=True)
class _Verdict:
    what: str
    because: tuple[str, ...]
    hint: str


def store() -> TCPStore | None:
    """Where this rank introduced itself, if it did."""
    return _store


def rendezvous(plan: Plan, *, wait_seconds: float = WAIT_SECONDS) -> None:
    """Wait for all ranks of the environment's world, and compare them with rank 0. Collective.

    Raises:
        PlanMismatchError: some have other versions, or another plan.
        RequestError: some did not come within `wait_seconds`, or the port is taken.
    """
    global _store
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _store = _connected(rank, wait_seconds)
    card = RankDescription(socket.gethostname(), versions(), plan.digest)
    _store.set(_described(rank), msgspec.json.encode(card).decode())
    if rank == 0:
        missing = _wait(_store, world_size, wait_seconds)
        verdict = _on_missing(missing, plan, wait_seconds) if missing else None
        if verdict is None:
            cards = [
                msgspec.json.decode(_store.get(_described(other)), type=RankDescription) for other in range(world_size)
            ]
            verdict = compare(cards)
        _store.set("frugal/verdict", msgspec.json.encode(verdict).decode())
    else:
        verdict = _told(_store, wait_seconds)
    if verdict is not None:
        kind = RequestError if verdict.what.startswith("not all") else PlanMismatchError
        raise kind(verdict.what, because=verdict.because, hint=verdict.hint)


def compare(cards: Sequence[RankDescription]) -> _Verdict | None:
    """What is wrong with ranks that are not like rank 0; `cards` are in rank order."""
    because = []
    for name, ours in cards[0].versions.items():
        found = [card.versions.get(name, "none") for card in cards]
        if set(found) != {ours}:
            because.append("; ".join(f"{where} has {name} {each}" for each, where in _by(cards, found)))
    if because:
        return _Verdict(
            "the hosts do not run the same versions", tuple(because),
            "install the same on all; `frugal doctor --hostfile HOSTS` shows what each has",
        )  # fmt: skip
    if any(card.digest != cards[0].digest for card in cards):
        digests = [card.digest for card in cards]
        told = (f"{where} holds plan {digest[:12]}" for digest, where in _by(cards, digests))
        return _Verdict("the ranks were given different plans", tuple(told), "give every node the same plan.json")
    return None


def _by(cards: Sequence[RankDescription], values: Sequence[str]) -> list[tuple[str, str]]:
    """Each of the ranks' values with who has it: hosts, and their ranks."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, (card, value) in enumerate(zip(cards, values, strict=True)):
        found.setdefault(value, {}).setdefault(card.host, []).append(rank)
    return [
        (each, ", ".join(f"{host} ({ranks_in_words(ranks)})" for host, ranks in hosts.items()))
        for each, hosts in found.items()
    ]


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


def _connected(rank: int, wait_seconds: float) -> TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun serves it itself
    try:
        return TCPStore(
            address, port, is_master=serves, timeout=timedelta(seconds=wait_seconds), wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    except DistNetworkError as error:
        if serves:
            if "EADDRINUSE" not in str(error):
                raise
            raise RequestError(f"port {port} is in use", hint="choose another port for the ranks to meet at") from None
        raise RequestError(
            f"{socket.gethostname()} does not reach rank 0 at {address}:{port}",
            because=f"it tried for {wait_seconds:.0f} s: {str(error).splitlines()[0]}",
            hint="is rank 0 running, and does a firewall let the port through? --nic names the network to use",
        ) from None


def _wait(store: TCPStore, world_size: int, seconds: float) -> list[int]:
    """Wait for everybody's card; the ranks that did not leave one."""
    began, said = time.monotonic(), False
    while True:
        try:
            store.wait([_described(rank) for rank in range(world_size)], timedelta(seconds=min(SAY_SECONDS, seconds)))
            return []
        except DistStoreError:
            missing = [rank for rank in range(world_size) if not store.check([_described(rank)])]
            if time.monotonic() - began >= seconds:
                return missing
            if missing and not said:
                said = True
                rank_logs.say(f"waiting for {ranks_in_words(missing)}")


def _on_missing(missing: list[int], plan: Plan, seconds: float) -> _Verdict:
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


def _told(store: TCPStore, seconds: float) -> _Verdict | None:
    try:
        store.wait(["frugal/verdict"], timedelta(seconds=seconds + SAY_SECONDS))
        return msgspec.json.decode(store.get("frugal/verdict"), type=_Verdict | None)
    except (DistStoreError, DistNetworkError):
        raise RuntimeError("Connection to rank 0 was lost before all ranks had come") from None


def _described(rank: int) -> str:
    return f"frugal/card/{rank}"
