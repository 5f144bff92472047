"""The rendezvous of all ranks before they form a process group: which are missing, and which differ from rank 0.

A process group says nothing of missing ranks until its timeout, and one between different versions of torch may fail
anywhere. So every rank first describes itself in the store (`store`) behind rank 0's gate (`gate`), at MASTER_ADDR and
MASTER_PORT; rank 0 compares all descriptions and writes its verdict there, which all ranks follow. The process group
uses the same store.
"""

import errno
import hmac
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import msgspec
from torch.distributed import DistNetworkError, DistStoreError, HashStore, Store, TCPStore, register_rendezvous_handler

from frugal.config.hardware.local_host import versions
from frugal.distributed import env, rank_logs
from frugal.distributed.connections import gate, handshake, secret
from frugal.distributed.connections import store as run_store
from frugal.distributed.connections.handshake import Introduction
from frugal.errors import PlanMismatchError, RequestError
from frugal.planning.plan import Plan

WAIT_SECONDS = 300.0
"""Until a missing rank is given up. On a node with a slow disk ranks take a minute to start."""

NOTICE_SECONDS = 30.0
"""Until rank 0 says whom it waits for."""

LONGEST_WAIT = timedelta(days=20)
"""A socket's timeout must be below 2^31 milliseconds."""

METHOD = "frugal://"
"""What torch calls this rendezvous, where a process group is made."""

_VERDICT, _GATE = "frugal/verdict", "frugal/gate"

_store: Store | None = None  # one a process

watched: SimpleQueue[tuple[socket.socket, Introduction]] = SimpleQueue()
"""On rank 0: connections of other ranks for the peer watch."""


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


def store() -> Store | None:
    """The store of this rank's rendezvous; None before one."""
    return _store


def join_store(wait_seconds: float = WAIT_SECONDS) -> Store:
    """The store of all ranks of the environment's world.

    Raises:
        RequestError: rank 0 is not reached within `wait_seconds`, has another secret, or its port is in use.
    """
    global _store
    if _store is None:
        env.choose_interfaces()
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size == 1:
            _store = HashStore()
            return _store
        if env.rank() == 0:
            if secret.of_run() is None:
                rank_logs.to_console(
                    f"no {secret.SECRET_FILE} is given: whoever reaches port {os.environ['MASTER_PORT']} could join "
                    "this run or end it (SECURITY.md)"
                )
            _open_gate(secret.of_run() or b"", world_size)
        _store = run_store.RankStore(
            [_connect(run_store.PURPOSE, wait_seconds) for _ in range(run_store.CONNECTIONS_OF_A_RANK)]
        )
    return _store


def _of_torch(_url: str, **_more: Any) -> Iterator[tuple[Store, int, int]]:
    """As torch calls it: the store, this rank, the world size."""
    yield join_store(), env.rank(), int(os.environ["WORLD_SIZE"])


register_rendezvous_handler(METHOD.removesuffix("://"), _of_torch)


def connect_to_watch() -> tuple[socket.socket, str]:
    """On other ranks than 0: a connection for the peer watch, and rank 0's host. Raises as `join_store`."""
    described = msgspec.json.decode(join_store().get(_key(0)), type=RankDescription)
    return _connect("watch", WAIT_SECONDS), described.host


def rendezvous(plan: Plan, *, wait_seconds: float = WAIT_SECONDS) -> None:
    """Wait for all ranks of the environment's world, and compare them with rank 0. Collective.

    Raises:
        PlanMismatchError: some have other versions, or another plan.
        RequestError: some are missing after `wait_seconds`, or the port is in use.
    """
    rank, world_size, store = env.rank(), int(os.environ["WORLD_SIZE"]), join_store(wait_seconds)
    own = RankDescription(socket.gethostname(), versions(), plan.digest)
    store.set(_key(rank), msgspec.json.encode(own).decode())
    if rank == 0:
        if missing := _wait_for_all(store, world_size, wait_seconds):
            verdict: _Verdict | None = _missing_ranks(missing, plan, wait_seconds)
        else:
            ranks = range(world_size)
            verdict = compare([msgspec.json.decode(store.get(_key(rank)), type=RankDescription) for rank in ranks])
        store.set(_VERDICT, msgspec.json.encode(verdict).decode())
    else:
        verdict = _read_verdict(store, wait_seconds)
    if verdict is not None:
        kind = RequestError if verdict.what.startswith("not all") else PlanMismatchError
        raise kind(verdict.what, because=verdict.because, hint=verdict.hint)


def wait_for_all(what: str) -> None:
    """Return once all ranks have called this with the same `what`, however long that takes. Collective.

    Collectives give up after minutes (NCCL 10, gloo 30); a rank that tokenises data may take hours. If a rank is lost
    meanwhile, the peer watch or the launcher ends this one.
    """
    if (store := _store) is None or int(os.environ["WORLD_SIZE"]) == 1:
        return
    keys = [f"frugal/{what}/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    store.set(keys[env.rank()], "")
    store.wait(keys, LONGEST_WAIT)


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


def _open_gate(secret_of_run: bytes, world_size: int) -> None:
    """On rank 0: let the others in at MASTER_PORT; where torchrun serves a store of its own there, at a port it tells.

    Raises:
        RequestError: the port is in use.
    """
    agent = _store_of_torchrun()
    port = 0 if agent is not None else int(os.environ["MASTER_PORT"])
    try:
        server = gate.listen(port, world_size)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RequestError(f"port {port} is in use", hint="choose another port with --master-port") from None
        raise RequestError(
            f"rank 0 cannot listen at {gate.address_of_rank_0()}, port {port}", because=error.strerror or str(error),
            hint="MASTER_ADDR is the address of rank 0's host, and --master-port a port that it may use",
        ) from None  # fmt: skip
    if agent is not None:
        port = server.getsockname()[1]
        agent.set(_GATE, f"{port} {_signature(secret_of_run, port)}")
    run_store.serve(server, secret_of_run, world_size, lambda sock, said: watched.put((sock, said)))


def _connect(purpose: str, seconds: float) -> socket.socket:
    """A proven connection of this rank to rank 0.

    Raises:
        RequestError: there is none after `seconds`.
    """
    secret_of_run, address = secret.of_run() or b"", gate.address_of_rank_0()
    port, agent = int(os.environ["MASTER_PORT"]), _store_of_torchrun()

    def where() -> tuple[str, int]:
        return address, port if agent is None else _port_told(agent, secret_of_run)

    try:
        return handshake.connect(where, secret_of_run, purpose, env.rank(), seconds)
    except handshake.RefusedError as error:
        raise RequestError(
            f"{socket.gethostname()} has another secret than rank 0 at {address}:{port}",
            because=str(error),
            hint=f"give all ranks the same {secret.SECRET_FILE}; or is another run at this port? --master-port",
        ) from None
    except OSError as error:
        raise RequestError(
            f"{socket.gethostname()} does not reach rank 0 at {address}:{port}",
            because=f"it tried for {seconds:.0f} s: {error}",
            hint="is rank 0 running, and does a firewall let the port through? --set train.nic=NAME names the network",
        ) from None


def _store_of_torchrun() -> TCPStore | None:
    """The store that torchrun's agent serves at MASTER_PORT, open to all; None under other launchers."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=WAIT_SECONDS))


def _port_told(agent: TCPStore, secret_of_run: bytes) -> int:
    """Where rank 0 says that its gate is. Raises OSError where it has not said so, or another has."""
    try:
        agent.wait([_GATE], timedelta(seconds=NOTICE_SECONDS))
        told = agent.get(_GATE)
    except (DistStoreError, DistNetworkError) as error:
        raise ConnectionError(f"torchrun's store does not tell its port: {str(error).splitlines()[0]}") from None
    port, _, signature = told.partition(b" ")
    if not hmac.compare_digest(signature, _signature(secret_of_run, port.decode(errors="replace")).encode()):
        raise handshake.RefusedError("what torchrun's store says of it is not signed with this run's secret")
    return int(port)


def _signature(secret_of_run: bytes, port: int | str) -> str:
    return hmac.digest(secret_of_run, f"gate at port {port}".encode(), "sha256").hex()


def _wait_for_all(store: Store, world_size: int, seconds: float) -> list[int]:
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


def _read_verdict(store: Store, seconds: float) -> _Verdict | None:
    try:
        store.wait([_VERDICT], timedelta(seconds=seconds + NOTICE_SECONDS))
        return msgspec.json.decode(store.get(_VERDICT), type=_Verdict | None)
    except (DistStoreError, DistNetworkError):
        raise RuntimeError("Connection to rank 0 was lost before all ranks had come") from None


def _key(rank: int) -> str:
    """Under which a rank describes itself in the store."""
    return f"frugal/rank/{rank}"
