"""Two recordings give the peak of every micro-batch, by following each storage."""

from dataclasses import replace
from random import Random

import msgspec
import pytest

from frugal.planning.memory.timeline import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    PARAMETERS,
    TEMPORARY,
    NotAffineError,
    Timeline,
    TimelineBuilder,
)


def recording(micro_batch: int, **changes: object) -> Timeline:
    """A weight; activations of two layers; in backward a gradient while they go. Peaks in forward or at the end."""
    made = Timeline(
        fixed=(1000, 10 * micro_batch, 30 * micro_batch + 4, 500, 700),
        per_sample=(0,) * 5,
        categories=(PARAMETERS, ACTIVATIONS, ACTIVATIONS, GRADIENTS, TEMPORARY),
        operators=(1, 2, 2, 3, 4),
        modules=(0, 5, 6, 0, 0),
        names=("", "empty", "mm", "mm_backward", "cat", "layer.0", "layer.1"),
        events=(0, 1, 2, 3, 2, 1, 4, 4),
        phases=(("initialisation", 0), ("forward", 1), ("backward", 3), ("optimizer step", 6)),
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # any field


TIMELINE = Timeline.fit(recording(2), recording(3), (2, 3))


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 17, 1000])
def test_the_fit_is_exact_at_every_micro_batch(micro_batch: int) -> None:
    direct = recording(micro_batch)
    assert TIMELINE.peak(micro_batch) == direct.peak(micro_batch)
    assert TIMELINE.intervals(micro_batch) == direct.intervals(micro_batch)
    assert list(TIMELINE.sizes(micro_batch)) == list(recording(micro_batch).fixed)


def test_the_peak_moves_to_another_phase_as_the_micro_batch_grows() -> None:
    assert (TIMELINE.peak(1).phase, TIMELINE.peak(1).total_bytes) == ("optimizer step", 2200)
    assert (TIMELINE.peak(20).phase, TIMELINE.peak(20).total_bytes) == ("backward", 2304)


def test_a_line_through_two_peaks_would_be_wrong() -> None:
    first, second = TIMELINE.peak_bytes(2), TIMELINE.peak_bytes(3)
    assert TIMELINE.peak_bytes(100) > 2 * (first + 98 * (second - first))


def test_the_categories_at_the_peak_add_up_to_it() -> None:
    peak = TIMELINE.peak(20)
    assert sum(peak.categories.values()) == peak.total_bytes
    assert peak.categories["activations"] == 804
    assert peak.categories["gradients"] == 500
    assert peak.operator == "mm_backward"


def drawn(seed: int) -> Timeline:
    """A timeline of storages of any category that end in any order or never; some are empty for one sample."""
    draws, made = Random(seed), TimelineBuilder()
    alive = [made.born(10**6, PARAMETERS, "empty")]
    for phase in range(draws.randint(1, 6)):
        made.phase(f"phase {phase % 4}")
        for event in range(draws.randint(0, 40)):
            if draws.random() < 0.4 and len(alive) > 1:
                made.events.append(alive.pop(draws.randrange(1, len(alive))))
            else:
                slope = draws.choice((0, 0, draws.randrange(1000)))
                fixed = draws.choice((0, -slope, draws.randrange(10**5)))
                category = draws.randrange(len(CATEGORIES))
                alive.append(made.born(fixed, category, f"operator {event}", f"layer.{phase}", slope))
    return replace(made.timeline(), phases=(("initialisation", 0), *made.phases))


@pytest.mark.parametrize("seed", range(60))
def test_an_outline_has_the_peak_of_its_timeline_at_every_micro_batch(seed: int) -> None:
    made = drawn(seed)
    outline = made.outline
    for micro_batch in (*range(1, 40), 1000, 10**6):
        assert outline.peak(micro_batch) == made.peak(micro_batch)
    assert outline.names == made.names
    assert len(outline.fixed) <= len(CATEGORIES) * len(made._envelope[0])


def test_the_holders_of_a_category_are_modules_largest_first() -> None:
    assert TIMELINE.holders(20, "activations") == [("layer.1", 604), ("layer.0", 200)]


def test_each_phase_has_its_peak_and_its_end() -> None:
    assert [(i.phase, i.peak_bytes, i.live_bytes) for i in TIMELINE.intervals(10)] == [
        ("initialisation", 1000, 1000),
        ("forward", 1404, 1404),
        ("backward", 1904, 1500),
        ("optimizer step", 2200, 1500),
    ]


def test_a_gradient_that_grows_with_the_micro_batch_is_none() -> None:
    grows = [recording(b, fixed=(1000, 10, 30, 50 * b, 700)) for b in (2, 3)]
    assert Timeline.fit(grows[0], grows[1], (2, 3)).categories[3] == TEMPORARY


@pytest.mark.parametrize(
    ("second", "changes", "message"),
    [
        (
            3,
            {"events": (0, 1, 2, 3, 1, 2, 4, 4)},
            "storages live in another order at micro-batch 3 than at micro-batch 2",
        ),
        (3, {"operators": (1, 2, 2, 4, 4)}, "other operators run at micro-batch 3 than at micro-batch 2"),
        (3, {"fixed": (1000, 30, 94, 500)}, "5 storages at micro-batch 2, 4 at micro-batch 3"),
        (3, {"fixed": (1000, 30, 60, 500, 700)}, "a storage of 64 bytes grows to 60 with 1 more samples"),
        (4, {"fixed": (1000, 40, 125, 500, 700)}, "a storage of 64 bytes grows to 125 with 2 more samples"),
        (2, {}, "both recordings are of micro-batch 2"),
    ],
)
def test_recordings_that_are_no_line_are_refused(second: int, changes: dict[str, object], message: str) -> None:
    with pytest.raises(NotAffineError, match=message):
        Timeline.fit(recording(2), recording(second, **changes), (2, second))


def test_a_timeline_survives_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(TIMELINE), type=Timeline) == TIMELINE
