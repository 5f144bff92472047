"""What the ranks of a node measured becomes figures under the names of the dry-run ones."""

from pathlib import Path

from frugal.engine.measure.record import Measured, ModelDefinition, RankMeasurement
from frugal.units import GIB, MIB

GPUS = [
    RankMeasurement(
        phases={"forward": 5 * GIB, "backward": 7 * GIB}, reserved_bytes=8 * GIB,
        outside_bytes=500 * MIB, device_bytes=80 * GIB, rss_before_bytes=GIB, rss_peak_bytes=3 * GIB,
    ),
    RankMeasurement(
        phases={"forward": 6 * GIB, "backward": 6 * GIB}, reserved_bytes=7 * GIB,
        outside_bytes=900 * MIB, device_bytes=80 * GIB, rss_before_bytes=GIB, rss_peak_bytes=2 * GIB,
    ),
]  # fmt: skip


def test_of_gpus_each_figure_is_that_of_the_fullest_and_hosts_add_up() -> None:
    found = Measured.of(GPUS, "cuda")
    assert (found.phases, found.phase) == ({"forward": 6 * GIB, "backward": 7 * GIB}, "backward")
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (7 * GIB, 8 * GIB)
    assert (found.context_bytes, found.device_bytes) == (900 * MIB, 8 * GIB + 500 * MIB)
    assert (found.host_bytes_per_node, found.host_before_bytes_per_node) == (3 * GIB, 2 * GIB)


def test_a_cpu_reserves_what_it_allocates_and_has_no_context() -> None:
    found = Measured.of([RankMeasurement(phases={"forward": 10}, rss_before_bytes=100, rss_peak_bytes=90)], "cpu")
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (10, 10)
    assert (found.context_bytes, found.device_bytes, found.host_bytes_per_node) == (None, None, 0)


def test_a_definition_is_written_as_the_command_line_takes_it(tmp_path: Path) -> None:
    assert ModelDefinition(task="causal-lm", config={"model_type": "gpt2"}).write(tmp_path) == f"{tmp_path}/config.json"
    own = ModelDefinition(task=None, source="def mine(): ...\n", factory="mine")
    assert own.write(tmp_path) == f"{tmp_path}/model.py:mine"
    assert (tmp_path / "model.py").read_text() == "def mine(): ...\n"
