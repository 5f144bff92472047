"""The store behind the gate does what torch's does, and answers in time."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from frugal.distributed.connections.handshake import connect
from frugal.distributed.connections.store import RankStore
from torch.distributed import DistNetworkError, DistStoreError, HashStore, PrefixStore, Store

from frugal.distributed.connections import gate, store


def of_ranks(number: int) -> list[RankStore]:
    server = gate.listen(0, number)
    address = server.getsockname()[:2]
    store.serve(server, b"secret", number, lambda sock, _: sock.close())
    return [
        RankStore([connect(lambda: address, b"secret", store.PURPOSE, rank, 10) for _ in range(2)])
        for rank in range(number)
    ]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RankStore]]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield of_ranks(2)


def told(shared: Store) -> list[object]:
    """What a store answers to all that torch asks of one."""
    shared.set_timeout(timedelta(seconds=0.2))
    shared.set("text", "a")
    shared.append("text", "b")
    shared.multi_set(["x", "y"], ["1", "2"])
    answers: list[object] = [
        shared.get("text"), shared.multi_get(["y", "x"]), shared.add("count", 3), shared.add("count", -1),
        shared.get("count"), shared.check(["x", "y"]), shared.check(["x", "z"]), shared.compare_set("claim", "", "7"),
        shared.compare_set("claim", "", "8"), shared.compare_set("claim", "7", "9"), shared.compare_set("z", "1", "2"),
        shared.delete_key("x"), shared.delete_key("x"), shared.has_extended_api(), shared.num_keys(),
    ]  # fmt: skip
    for late in (lambda: shared.get("nobody"), lambda: shared.wait(["y", "nobody"], timedelta(seconds=0.1))):
        with pytest.raises(DistStoreError):
            late()
    shared.wait(["y", "claim"])
    return answers


def test_it_answers_as_torchs_own(ranks: list[RankStore]) -> None:
    expected = told(HashStore())
    assert told(ranks[0]) == expected
    through_cpp = told(PrefixStore("a group's", ranks[1].clone()))  # as process groups ask
    assert through_cpp[:-1] == expected[:-1]
    assert through_cpp[-1] == 2 * int(str(expected[-1]))  # of both


def test_a_key_is_waited_for_while_others_are_answered(ranks: list[RankStore]) -> None:
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(ranks[1].get, "late")
        assert ranks[1].add("other", 1) == 1
        time.sleep(0.1)
        assert not waiting.done()
        ranks[0].set("late", b"here\0")
        assert waiting.result(timeout=10) == b"here\0"


def test_a_rank_whose_connections_are_gone_is_told_so(ranks: list[RankStore]) -> None:
    for _ in range(2):
        sock = ranks[1]._idle.get()
        sock.close()
        ranks[1]._idle.put(sock)
    with pytest.raises(DistNetworkError, match="Connection to rank 0's store was lost"):
        ranks[1].get("key")
    assert ranks[1].check(["key"]) is False
    assert ranks[0].add("others", 1) == 1
