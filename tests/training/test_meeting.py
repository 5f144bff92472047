"""Ranks that are not alike are told apart before they form a process group, by host and rank."""

import pytest

from frugal.training.meeting import Card, compare, ranks_in_words

V = {"frugal": "0.1.0", "torch": "2.13.0"}


def card(host: str, digest: str = "a" * 64, **versions: str) -> Card:
    return Card(host, V | versions, digest)


def test_ranks_that_are_alike_are_not_spoken_of() -> None:
    assert compare([card("n1"), card("n1"), card("n2")]) is None


def test_other_versions_are_named_with_hosts_and_ranks() -> None:
    verdict = compare([card("n1"), card("n1"), card("n2", torch="2.12.1"), card("n3"), card("n2", torch="2.12.1")])
    assert verdict is not None
    assert verdict.what == "the hosts do not run the same versions"
    assert verdict.because == ("n1 (ranks 0-1), n3 (rank 3) has torch 2.13.0; n2 (ranks 2, 4) has torch 2.12.1",)


def test_other_plans_are_named_with_hosts_and_ranks() -> None:
    verdict = compare([card("n1"), card("n2", digest="b" * 64)])
    assert verdict is not None
    assert verdict.what == "the ranks were given different plans"
    assert verdict.because == ("n1 (rank 0) holds plan aaaaaaaaaaaa", "n2 (rank 1) holds plan bbbbbbbbbbbb")


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([7, 1, 0, 2, 9], "ranks 0-2, 7, 9")]
)
def test_ranks_are_counted_in_runs(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words
