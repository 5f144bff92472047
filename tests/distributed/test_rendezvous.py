"""Ranks that are not alike are told apart before they form a process group, by host and rank."""

import os
import signal
import socket
import threading
from dataclasses import replace

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from bench.plans import plan_by_hand
from bench.ranks import free_port
from frugal.config.hardware.cluster import Node
from frugal.distributed import rendezvous
from frugal.distributed.rendezvous import RankDescription, compare
from frugal.errors import RequestError

V = {"frugal": "0.1.0", "torch": "2.13.0"}


def rank_on(host: str, digest: str = "a" * 64, **versions: str) -> RankDescription:
    return RankDescription(host, V | versions, digest)


OLDER = {"torch": "2.12.1"}


@pytest.mark.parametrize(
    ("ranks", "what", "because"),
    [
        ([rank_on("n1"), rank_on("n1"), rank_on("n2")], None, ()),
        (
            [rank_on("n1"), rank_on("n1"), rank_on("n2", **OLDER), rank_on("n3"), rank_on("n2", **OLDER)],
            "the hosts do not run the same versions",
            ("n1 (ranks 0-1), n3 (rank 3) has torch 2.13.0; n2 (ranks 2, 4) has torch 2.12.1",),
        ),
        (
            [rank_on("n1"), rank_on("n2", digest="b" * 64)],
            "the ranks were given different plans",
            ("n1 (rank 0) holds plan aaaaaaaaaaaa", "n2 (rank 1) holds plan bbbbbbbbbbbb"),
        ),
    ],
)
def test_other_versions_and_plans_are_named_with_hosts_and_ranks(
    ranks: list[RankDescription], what: str | None, because: tuple[str, ...]
) -> None:
    verdict = compare(ranks)
    assert (verdict and verdict.what, verdict.because if verdict else ()) == (what, because)


def test_a_rank_that_does_not_come_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_by_hand(world_size=3, global_batch=6, micro_batch=2, zero_stage=2)
    device = plan.cluster.devices[0]
    nodes = tuple(Node(devices=(device,) * number) for number in (1, 2))
    plan = replace(plan, cluster=replace(plan.cluster, nodes=nodes))
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "joined", None)
    with pytest.raises(RequestError) as caught:
        rendezvous.rendezvous(plan, wait_seconds=1)
    assert str(caught.value) == (
        "not all ranks came within 1 s\n  because node 1 of the plan: ranks 1-2\n\n"
        "hint: start the command on every node; the output of these ranks is in logs/ of the run's folder on their host"
    )


def test_ctrl_c_is_heard_while_rank_0_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "joined", None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in place.items():
            monkeypatch.setenv(name, value)

        def interrupt() -> None:
            with silent.accept()[0]:
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            rendezvous.join_store(600)  # longer than a test may take


def test_nothing_that_was_written_without_the_secret_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    store, key, own = HashStore(), "frugal/rank/1", rank_on("n2")
    monkeypatch.setattr(rendezvous.secret, "of_run", lambda: b"a secret of 32 bytes ...........")
    rendezvous._write(store, key, own)
    good = store.get(key).decode()
    assert rendezvous._read(store, key, RankDescription) == own
    nested = "[" * 100_000
    for name, message in {
        "another rank's": good, "changed": good.replace("n2", "n3"), "unsigned": good[64:], "nested lists": nested,
        "nested lists behind a proof": good[:64] + nested, "not text": "\xff" * 70, "nothing": "",
    }.items():  # fmt: skip
        read = "frugal/rank/2" if name == "another rank's" else key
        store.set(read, message)
        with pytest.raises(RuntimeError, match=f"{read} in the store of the ranks was not written by a rank"):
            rendezvous._read(store, read, RankDescription)
    monkeypatch.setattr(rendezvous.secret, "of_run", lambda: b"another secret of 32 bytes .....")
    store.set(key, good)
    with pytest.raises(RuntimeError, match="was not written by a rank of this run"):
        rendezvous._read(store, key, RankDescription)


def test_another_secret_than_rank_0_has_is_said_at_once_and_ends_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "SECRET_SECONDS", 0.0)
    monkeypatch.setattr(rendezvous, "joined", None)
    port, rank_0 = free_port(), "rank 0 at 127.0.0.1:"
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    serves = TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    PrefixStore("of another secret", serves).set(rendezvous._PRESENT, "")
    with pytest.raises(RequestError) as caught:
        rendezvous.join_store(0.5)
    host = socket.gethostname()
    said = f"{host} sees nothing of {rank_0}{port} yet: do both have the same FRUGAL_SECRET_FILE?\n"
    assert capsys.readouterr().err == said
    assert str(caught.value).startswith(
        f"{host} has another secret than {rank_0}{port}\n  because rank 0 wrote nothing "
    )
