"""The rendezvous of all ranks before they form a process group: which are missing, and which differ from rank 0.

Ranks meet in torch's own TCPStore, which rank 0 serves at MASTER_PORT on the interface that leads to it, or which
torchrun serves. Every key begins with bytes that are derived from the run's secret, so that another run, or a process
that does not know the secret, names none of them (docs/decisions/rendezvous.md). What frugal writes there begins with
its HMAC-SHA256 under the secret, and nothing else is parsed: the store's protocol also lists and sets keys.

A process group reports nothing about missing ranks until its timeout, and one between different versions of torch may
fail anywhere. So every rank first describes itself in the store; rank 0 compares all descriptions and writes its
verdict there, which all ranks follow. The process group uses the same store.
"""

import errno
import hmac
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
from torch.distributed import (
    DistNetworkError,
    DistStoreError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    register_rendezvous_handler,
)

from frugal.config.hardware.local_host import versions
from frugal.distributed import env, rank_logs
from frugal.distributed.connections import peers, secret
from frugal.errors import FrugalError, PlanMismatchError, RequestError
from frugal.planning.plan import Plan

WAIT_SECONDS = 300.0
"""Time after which a missing rank is an error. On a node with a slow disk ranks take a minute to start."""

NOTICE_SECONDS = 30.0
"""Time after which rank 0 says which ranks it waits for."""

SECRET_SECONDS = 5.0
"""Time after which a rank that sees nothing of rank 0 under its secret says so: rank 0 writes as soon as it serves."""

OTHER_SECRET_SECONDS = 60.0
"""Time after which that is an error: a flood of rank 0's port may hold up its own connection to its store."""

METHOD = "frugal://"
"""The name of this rendezvous in torch, where a process group is made."""

_PRESENT = "frugal/rank 0 is here"
_LOST = "Connection to rank 0 was lost before all ranks had come"
_POLL_SECONDS = 0.1
_READ_SECONDS = 5.0
_HEX_BYTES = 64  # of a SHA-256

joined: Store | None = None  # the store of this rank's rendezvous
server: socket.socket | None = None  # at which rank 0 serves it; None on other ranks, and where torchrun does


class RankDescription(msgspec.Struct):
    """One rank: its host's name, the versions installed there, the digest of its plan."""

    host: str
    versions: dict[str, str]
    digest: str


def join_store(wait_seconds: float = WAIT_SECONDS) -> Store:
    """Return the store of all ranks of the environment's world.

    Raises:
        RequestError: rank 0 is not reached within `wait_seconds`, or its port is in use.
    """
    global joined
    if joined is not None:
        return joined
    env.choose_interfaces()
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        joined = HashStore()
        return joined
    if env.rank() == 0 and secret.of_run() is None:
        rank_logs.to_console(
            f"no {secret.SECRET_FILE} is given: any process that reaches port {os.environ['MASTER_PORT']} could "
            "join this run or end it (SECURITY.md)"
        )
    connected = _connect(world_size, wait_seconds)
    connected.set_timeout(timedelta(seconds=wait_seconds))
    joined = PrefixStore(_digest("store").hex(), connected)
    if env.rank() == 0:
        joined.set(_PRESENT, "")
    else:
        _wait_for_rank_0(joined, wait_seconds)
    return joined


def _connect(world_size: int, seconds: float) -> TCPStore:
    """Serve the store on rank 0, connect to it on the others. Raises as `join_store`."""
    global server
    address, port = peers.address_of_rank_0(), int(os.environ["MASTER_PORT"])
    listening: int | None = None
    if _is_of_torchrun():
        address = os.environ["MASTER_ADDR"]
    elif env.rank() == 0:
        env.raise_descriptors(world_size)
        try:
            server = peers.listen(port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RequestError(f"port {port} is in use", hint="choose another port with --master-port") from None
            raise RequestError(
                f"rank 0 cannot listen at {address}, port {port}", because=error.strerror or str(error),
                hint="MASTER_ADDR is the address of rank 0's host, and --master-port a port that it may use",
            ) from None  # fmt: skip
        listening, bound = os.dup(server.fileno()), server.getsockname()[0]
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)
    connected = Future[TCPStore]()
    connect = partial(
        TCPStore, address, port, world_size, listening is not None, timedelta(seconds=seconds),
        wait_for_workers=False, master_listen_fd=listening, use_libuv=True,
    )  # fmt: skip
    threading.Thread(target=_settle, args=(connected, connect), name="frugal rendezvous", daemon=True).start()
    try:
        return connected.result()  # torch's own attempt hears no Ctrl-C
    except RuntimeError as error:
        raise RequestError(
            f"{socket.gethostname()} does not reach rank 0 at {address}:{port}",
            because=f"it tried for {seconds:.0f} s: {str(error).splitlines()[0]}",
            hint="is rank 0 running, and its port open in the firewall? GLOO_SOCKET_IFNAME names a network",
        ) from None


def _settle(connected: Future[TCPStore], connect: Callable[[], TCPStore]) -> None:
    try:
        connected.set_result(connect())
    except Exception as error:  # raised again where the result is waited for
        connected.set_exception(error)


def _rendezvous_of_torch(_url: str, **_more: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield the store, this rank and the world size, as torch asks for them."""
    yield join_store(), env.rank(), int(os.environ["WORLD_SIZE"])


register_rendezvous_handler(METHOD.removesuffix("://"), _rendezvous_of_torch)


def rendezvous(plan: Plan, *, wait_seconds: float = WAIT_SECONDS) -> None:
    """Wait for all ranks of the environment's world, and compare them with rank 0. Collective.

    Raises:
        PlanMismatchError: some have other versions, or another plan.
        RequestError: some are missing after `wait_seconds`, or the port is in use.
    """
    rank, world_size, store = env.rank(), int(os.environ["WORLD_SIZE"]), join_store(wait_seconds)
    described = collect(RankDescription(socket.gethostname(), versions(), plan.digest), RankDescription, wait_seconds)
    error = None
    if rank == 0:
        missing = [number for number, each in enumerate(described) if each is None]
        error = _missing_ranks(missing, plan, wait_seconds) if missing else compare(described)
    parts = error and (error.exit_code, error.what, error.because, error.hint)
    if (verdict := share("verdict", parts, tuple[int, str, tuple[str, ...], str] | None, wait_seconds)) is None:
        return
    with suppress(RuntimeError):  # the store ends with rank 0, and the others are to read the verdict before
        if store.add("frugal/verdict/read", 1) == world_size:
            store.set("frugal/verdict/read by all", "")
        if rank == 0:
            _is_set(store, ["frugal/verdict/read by all"], min(_READ_SECONDS, wait_seconds))
    code, what, because, hint = verdict
    kind = RequestError if code == RequestError.exit_code else PlanMismatchError
    raise kind(what, because=because, hint=hint)


def hosts() -> list[str]:
    """Return each rank's host, after `rendezvous`."""
    store, world_size = join_store(), int(os.environ["WORLD_SIZE"])
    return [_read(store, _key(rank), RankDescription).host for rank in range(world_size)]


def share(what: str, value: Any, kind: Any, wait_seconds: float = WAIT_SECONDS) -> Any:
    """Return rank 0's `value`, of type `kind`, on all ranks. Collective, once for each `what`.

    Raises:
        RuntimeError: rank 0 is lost, or has shared nothing within `wait_seconds` and `NOTICE_SECONDS`.
    """
    store, key = join_store(wait_seconds), f"frugal/{what}"
    if env.rank() == 0:
        _write(store, key, value)
        return value
    with _connected():
        if _is_set(store, [key], wait_seconds + NOTICE_SECONDS):
            return _read(store, key, kind)
    raise RuntimeError(_LOST)


def collect(value: Any, kind: Any, wait_seconds: float) -> list[Any]:
    """Return on rank 0 each rank's value, of type `kind`, and None for a rank that did not come; nothing on the others.

    No process group is needed: this is how to find out whether there could be one. Raises as `join_store`.
    """
    rank, world_size, store = env.rank(), int(os.environ["WORLD_SIZE"]), join_store(wait_seconds)
    _write(store, _key(rank), value)
    if rank != 0:
        store.check([_key(rank)])  # the answer comes after what was written before
        return []
    missing = _wait_for_ranks(store, world_size, wait_seconds)
    return [None if each in missing else _read(store, _key(each), kind) for each in range(world_size)]


def wait_for_all(what: str) -> None:
    """Return once all ranks have called this with the same `what`, however long that takes. Collective.

    Collectives give up after minutes (NCCL 10, gloo 30); a rank that tokenises data may take hours. If a rank is lost
    meanwhile, the peer watch or the launcher ends this one.
    """
    if joined is not None and int(os.environ["WORLD_SIZE"]) > 1:
        if joined.add(f"frugal/{what}", 1) == int(os.environ["WORLD_SIZE"]):
            joined.set(f"frugal/{what}/all", "")
        _is_set(joined, [f"frugal/{what}/all"], math.inf)


def _is_set(store: Store, keys: list[str], seconds: float) -> bool:
    """Wait until all keys are set; return False if they are not after `seconds`.

    It polls: TCPStore's own wait hears no signals, and lets no other thread use the store.
    """
    end = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _write(store: Store, key: str, value: Any) -> None:
    """Set `key` to a value that `_read` accepts."""
    text = msgspec.json.encode(value).decode()
    store.set(key, _digest(f"{key} {text}").hex() + text)


def _read(store: Store, key: str, kind: Any) -> Any:
    """Return the value, of type `kind`, that a rank wrote under `key`.

    Raises:
        RuntimeError: it was written without the run's secret.
    """
    message = store.get(key)
    text = message[_HEX_BYTES:].decode(errors="replace")
    if not hmac.compare_digest(message[:_HEX_BYTES], _digest(f"{key} {text}").hex().encode()):
        raise RuntimeError(f"{key} in the store of the ranks was not written by a rank of this run (SECURITY.md)")
    return msgspec.json.decode(text, type=kind)


def _digest(text: str) -> bytes:
    """Return the HMAC-SHA256 of `text` under the run's secret, for this start of its ranks."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives the ranks
    return hmac.digest(secret.of_run() or b"", f"{attempt} {text}".encode(), "sha256")


def compare(ranks: Sequence[RankDescription]) -> FrugalError | None:
    """Return how ranks differ from rank 0, in rank order; None if they do not."""
    because = []
    for name, version_of_rank_0 in ranks[0].versions.items():
        versions_by_rank = [rank.versions.get(name, "none") for rank in ranks]
        if set(versions_by_rank) != {version_of_rank_0}:
            holders = _holders(ranks, versions_by_rank)
            because.append("; ".join(f"{where} has {name} {version}" for version, where in holders.items()))
    if because:
        return PlanMismatchError(
            "the hosts do not run the same versions", because=because,
            hint="install the same on all; `frugal doctor --hostfile HOSTS` shows what each has",
        )  # fmt: skip
    if any(rank.digest != ranks[0].digest for rank in ranks):
        holders = _holders(ranks, [rank.digest for rank in ranks])
        because = [f"{where} holds plan {digest[:12]}" for digest, where in holders.items()]
        return PlanMismatchError(
            "the ranks were given different plans", because=because, hint="give every node the same plan.json"
        )
    return None


def _holders(ranks: Sequence[RankDescription], values: Sequence[str]) -> dict[str, str]:
    """Return for each value the hosts and ranks that have it."""
    ranks_by_value: dict[str, dict[str, list[int]]] = {}
    for number, (rank, value) in enumerate(zip(ranks, values, strict=True)):
        ranks_by_value.setdefault(value, {}).setdefault(rank.host, []).append(number)
    return {
        value: ", ".join(f"{host} ({ranks_in_words(numbers)})" for host, numbers in hosts.items())
        for value, hosts in ranks_by_value.items()
    }


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return `rank 3`, `ranks 0-3`, or `ranks 0-3, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if len(runs) == 1 and runs[0][0] == runs[0][1] else 's'} {words}"


def _wait_for_ranks(store: Store, world_size: int, seconds: float) -> list[int]:
    """Wait for all ranks' descriptions; return the ranks that are missing in the end."""
    keys = [_key(rank) for rank in range(world_size)]
    missing: list[int] = []
    for patience in (min(NOTICE_SECONDS, seconds), seconds - NOTICE_SECONDS):
        if missing and patience > 0:
            rank_logs.to_console(f"waiting for {ranks_in_words(missing)}")
        if _is_set(store, keys, patience):
            return []
        missing = [rank for rank in range(world_size) if not store.check([_key(rank)])]
    return missing


def _missing_ranks(missing: list[int], plan: Plan, seconds: float) -> FrugalError:
    because, first = [], 0
    for number, node in enumerate(plan.cluster.nodes):
        ranks = [rank for rank in missing if first <= rank < first + len(node.devices)]
        first += len(node.devices)
        if ranks:
            because.append(f"node {number} of the plan: {ranks_in_words(ranks)}")
    return RequestError(
        f"not all ranks came within {seconds:.0f} s", because=because,
        hint="start the command on every node; the output of these ranks is in logs/ of the run's folder on their host",
    )  # fmt: skip


def _wait_for_rank_0(store: Store, seconds: float) -> None:
    """Wait until rank 0 is seen in the store, whose keys have other names under another secret.

    Raises:
        RequestError: it is not. torchrun's store may be there long before rank 0, whose own is there with it.
    """
    host, rank_0 = socket.gethostname(), f"rank 0 at {peers.address_of_rank_0()}:{os.environ['MASTER_PORT']}"
    notice, patience = (NOTICE_SECONDS, seconds) if _is_of_torchrun() else (SECRET_SECONDS, OTHER_SECRET_SECONDS)
    with _connected():
        if _is_set(store, [_PRESENT], min(notice, seconds)):
            return
        rank_logs.to_console(f"{host} sees nothing of {rank_0} yet: do both have the same {secret.SECRET_FILE}?")
        if _is_set(store, [_PRESENT], min(patience, seconds)):
            return
    raise RequestError(
        f"{host} has another secret than {rank_0}",
        because=f"rank 0 wrote nothing under this rank's secret within {min(patience, seconds):.0f} s",
        hint=f"give all ranks the same {secret.SECRET_FILE}; or is another run at this port? --master-port",
    )


@contextmanager
def _connected() -> Iterator[None]:
    """Report a lost store as the loss of the rank that served it."""
    try:
        yield
    except (DistStoreError, DistNetworkError):
        raise RuntimeError(_LOST) from None


def _is_of_torchrun() -> bool:
    """Return whether the store is torchrun's, which may be there long before rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _key(rank: int) -> str:
    """Return the key of a rank's description in the store."""
    return f"frugal/rank/{rank}"
