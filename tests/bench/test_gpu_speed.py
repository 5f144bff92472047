"""The time of a step on a card by kind of kernel, from recorded kernels."""

from bench.gpu.speed import account, table


def test_kernels_that_overlap_count_once_and_short_gaps_are_no_pauses() -> None:
    ran = [("late", 100.0, 130.0), ("first", 0.0, 40.0), ("beside", 10.0, 50.0), ("first", 55.0, 60.0)]
    found = account(ran, seconds=0.0002)
    assert (found["busy"], found["idle"]) == (0.085, 0.115)
    assert found["kernels"] == {"first": [2, 0.045], "beside": [1, 0.04], "late": [1, 0.03]}
    assert found["pauses"] == {"late": 0.04}
    lines = table({"one": {"milliseconds": found}, "failed": {"failure": "no card"}}).splitlines()
    assert lines[0] == "| ms of a step | one |" and "| first | 0.04 in 2 |" in lines and lines[-1].startswith("| idle")
