"""Which ranks are dry-run: a rank keeps the gradient of every parameter that its part of the row touches."""

from frugal.dryrun.figures import likely_fullest, touched_elements


def test_a_parameter_counts_whole_on_every_rank_that_it_reaches() -> None:
    assert touched_elements([4, 4, 4], 2) == [8, 8]
    assert touched_elements([10, 1, 1], 3) == [10, 10, 12]
    assert touched_elements([6, 6], 2) == [6, 6]


def test_a_rank_in_the_middle_may_be_the_fullest() -> None:
    parameters = [10, 30, 30, 10]  # cut at 27 and 54
    assert touched_elements(parameters, 3) == [40, 60, 40]
    assert likely_fullest(parameters, 3, 2) == (1, 2)


def test_the_first_and_the_last_are_among_them_where_there_is_room() -> None:
    parameters = [100, 60, 60, 4]  # 28 each: rank 3 reaches into the first two, rank 5 into the two after
    assert touched_elements(parameters, 8) == [100, 100, 100, 160, 60, 120, 60, 64]
    assert likely_fullest(parameters, 8, 4) == (0, 3, 5, 7)


def test_a_row_shorter_than_the_world_leaves_ranks_empty() -> None:
    assert touched_elements([2], 4) == [2, 2, 0, 0]
