"""Successive halving over turns of a few steps, on seconds made up: who wins, who is given up, and when it ends."""

import random

import pytest

from frugal.training.measure.race import TURN, Race, most_contestants, steps_needed


def raced(seconds: list[float], *, noise: float = 0.0, seed: int = 0, drift: float = 0.0) -> tuple[Race, list[int]]:
    """A race to its end, and who ran each step; each step takes its contestant's seconds and what chance adds."""
    race, chance, ran = Race(len(seconds)), random.Random(seed), []
    while not race.is_over:
        ran.append(race.current)
        load = 1 + drift * ((len(ran) - 1) // (TURN * len(seconds)))  # grows from round to round
        race.after_step(seconds[race.current] * load * (1 + noise * chance.random()))
    return race, ran


def test_the_fastest_wins() -> None:
    race, ran = raced([1.0, 1.1, 0.8, 0.9, 1.2], noise=0.01)
    assert race.winner == race.current == 2
    assert race.gain_of(2) == pytest.approx(0.2, abs=0.02)
    assert len(ran) <= steps_needed(5)


def test_the_plan_stays_where_nothing_is_faster_beyond_the_noise() -> None:
    assert raced([1.0, 1.0, 1.0, 1.0], noise=0.2)[0].winner == 0
    assert raced([1.0, 0.995, 1.3])[0].winner == 0  # by less than a change is worth


@pytest.mark.parametrize("seed", range(20))
def test_chance_alone_seldom_wins_and_a_real_gain_does(seed: int) -> None:
    assert raced([1.0, 1.05, 1.02], noise=0.05, seed=seed)[0].winner == 0
    assert raced([1.0, 0.8, 1.02], noise=0.05, seed=seed)[0].winner == 1


def test_a_machine_that_slows_down_from_round_to_round_changes_nothing() -> None:
    assert raced([1.0, 0.9], drift=0.5)[0].winner == 1
    assert raced([1.0, 1.1], drift=0.5)[0].winner == 0


def test_what_is_far_slower_is_given_up_after_one_counted_step() -> None:
    race, ran = raced([1.0, 3.0, 0.9])
    assert ran.count(1) == 2
    assert race.contestants[1].out == "slower"
    assert race.winner == 2


def test_the_race_ends_as_soon_as_it_is_decided() -> None:
    assert len(raced([1.0, 1.2])[1]) < steps_needed(2)  # no noise at all
    assert len(raced([1.0, 1.0], noise=0.5)[1]) == steps_needed(2)


def test_who_cannot_run_is_out_and_the_others_go_on() -> None:
    race = Race(3)
    for _ in range(TURN):
        race.after_step(1.0)
    assert race.current == 1
    race.give_up("out of memory")
    while not race.is_over:
        race.after_step([1.0, 0.0, 0.7][race.current])
    assert (race.winner, race.contestants[1].out) == (2, "out of memory")


def test_as_many_race_as_the_steps_suffice_for() -> None:
    assert most_contestants(steps_needed(2) - 1, 9) < 2
    assert most_contestants(steps_needed(4), 9) == 4
    assert most_contestants(10_000, 9) == 9
    for number in range(2, 10):
        assert len(raced([1.0] * number, noise=0.5)[1]) <= steps_needed(number)
