"""`bench/gpu/truth.py` runs for real on a CPU; what only a GPU can answer is asked of a stand-in."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import truth as gpu_truth
from bench.gpu.configurations import configurations
from bench.gpu.predictions import Prediction
from bench.gpu.report import summary
from bench.gpu.truth import Bench
from bench.gpu.worker import Answer, Attention, Constants, Run
from frugal.dryrun.compare import Figures
from frugal.units import GIB, MIB
from tests.dryrun.test_measured import is_true, read

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive  # a minute
def test_two_configurations_are_predicted_run_and_compared_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "truth.json"
    command = [sys.executable, "-m", "bench.gpu.truth", "--device", "cpu", "--first", "2", "--out", str(out)]
    command += ["--record", str(tmp_path / "records")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    total = found["summary"]
    assert (total["measured"], total["families"], total["failures"], total["unusable_share"]) == (2, 2, 0, 0.0)
    assert total["allocated_error"]["worst"] <= 0.005
    peers = total["peers"].values()
    assert len(peers) == 2 and all(each["median"] > total["allocated_error"]["worst"] for each in peers)
    assert {"date", "command", "device", "driver", "versions"} <= found.keys()
    assert found["versions"].keys() >= {"torch", "deepspeed", "transformers"}
    for row in found["rows"]:
        phases = row["runs"]["free"]["answer"]["phases"]
        assert row["measured_bytes"] == max(phases.values()) > 0
        assert row["error"] == row["prediction"]["figures"]["peak_allocated_bytes"] / row["measured_bytes"] - 1
    records = [read(path) for path in sorted((tmp_path / "records").iterdir())]
    assert [each.measured.peak_allocated_bytes for each in records] == [row["measured_bytes"] for row in found["rows"]]
    assert all(is_true(each, each.predicted) for each in records)
    assert [(each.definition.config or {})["model_type"] for each in records] == ["gpt2", "llama"]


def test_a_gpu_is_asked_for_thirty_configurations_of_all_kinds() -> None:
    chosen = list(configurations("cuda"))
    assert len({each.name for each in chosen}) == len(chosen) >= 30
    assert len({each.family for each in chosen}) >= 3
    assert {each.zero_stage for each in chosen} == {0, 1, 2, 3}
    assert {each.activation_checkpointing for each in chosen} >= {"off", "selective", "full"}
    assert {each.loss for each in chosen} == {"plain", "tiled"}
    assert {each.precision for each in chosen} == {"bf16", "fp32"}
    assert {each.micro_batch for each in chosen} >= {0, 1}
    assert all(each.precision == "fp32" or each.zero_stage >= 2 for each in chosen)


class Card:
    """Stands for processes on a GPU of 16 GiB. A run takes what was predicted, and `low` more."""

    low = 0.0
    running: list[int] = []  # noqa: RUF012  # shared on purpose: what all processes have now
    most = 0

    def __init__(self, kind: str, traits: tuple[bool, bool]) -> None:
        self.traits = traits

    def ask(self, question: Run | Constants, *, seconds: float) -> Answer:
        assert isinstance(question, Run)
        needed = int(GIB * question.configuration.micro_batch * (1 + Card.low))
        Card.running.append(needed)
        Card.most = max(Card.most, sum(Card.running))
        time.sleep(0.01)
        Card.running.remove(needed)
        if question.cap_bytes is not None and question.cap_bytes < needed:
            return Answer(survived=False, clean=False)
        return Answer(
            phases={"forward": needed},
            of_gpu={"reserved_bytes": needed, "outside_bytes": 500 * MIB, "device_bytes": 16 * GIB},
            attention=(
                Attention(kernel="cudnn", predicted="flash", dtype="bfloat16", query=(1,), key=(1,), masked=False),
                Attention(kernel="math", predicted="efficient", dtype="float32", query=(1,), key=(1,), masked=True),
            ),
            deepspeed_bytes=needed // 2,
            accelerate_bytes=needed * 2,
            clean=True,
        )

    def end(self) -> None:
        pass


def of_card(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, low: float = 0.0, seconds: float = 60.0
) -> Bench:
    """A bench on the stand-in that has measured configurations of so many GiB."""
    monkeypatch.setattr(gpu_truth, "Process", Card)
    monkeypatch.setattr(Card, "low", low)
    Card.most = 0
    now = time.monotonic()
    bench = Bench(
        kind="cuda", folder=tmp_path, device_bytes=16 * GIB, deadline=now + seconds, limit=now + seconds,
        out=tmp_path / "truth.json",
    )  # fmt: skip
    for size, each in zip(sizes, configurations("cuda"), strict=False):
        configuration = type(each)(**{**vars(each), "micro_batch": size})
        total = size * GIB
        figures = Figures(
            peak_allocated_bytes=total, peak_reserved_bytes=total, smallest_capacity_bytes=total,
            categories={"parameters": total}, phases={"forward": total}, host_bytes_per_node=0, operator="mm",
            phase="forward",
        )  # fmt: skip
        bench.add(Prediction(configuration=configuration, figures=figures, expandable_reserved_bytes=total))
    bench.work(3)
    return bench


def test_each_configuration_runs_free_and_capped_and_some_in_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = of_card((1, 2, 3, 4, 5, 1, 2, 3, 4, 5), monkeypatch, tmp_path)
    assert all(row.runs.keys() >= {"free", "capped"} for row in bench.rows)
    assert sum("expandable" in row.runs for row in bench.rows) == gpu_truth.EXPANDABLE
    total = summary(bench.rows)
    assert (total["measured"], total["unusable_share"], total["allocated_error"]["worst"]) == (10, 0.0, 0.0)
    assert [each["kernel"] for each in total["attention"]["other_kernel"]] == ["cudnn", "math"]
    assert total["reserved_error"]["worst"] == total["expandable_error"]["worst"] == 0.0
    assert json.loads((tmp_path / "truth.json").read_text())["summary"]["measured"] == 10


def test_what_runs_together_fits_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of_card((5, 6, 7, 8, 9, 1, 2, 3, 4), monkeypatch, tmp_path)
    assert 9 * GIB <= Card.most < 16 * GIB


def test_an_estimate_that_is_too_low_is_unusable_and_it_is_found_how_much_was_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = of_card((4, 8), monkeypatch, tmp_path, low=0.04)
    for row in bench.rows:
        assert [name for name in row.runs if name.startswith("capped")] == [
            "capped", "capped x 1.01", "capped x 1.02", "capped x 1.05",
        ]  # fmt: skip
        assert row.runs["capped x 1.05"].answer.survived
    total = summary(bench.rows)
    assert total["unusable_share"] == 1.0
    assert total["allocated_error"]["lowest"] == pytest.approx(1 / 1.04 - 1)
    assert total["peers"]["DeepSpeed estimate_zero*_model_states_mem_needs"]["too_low_share"] == 1.0
    assert total["peers"]["accelerate estimate-memory"]["too_low_share"] == 0.0


def test_it_stops_cleanly_when_time_is_up_and_says_what_was_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = of_card((1, 1, 40), monkeypatch, tmp_path, seconds=0.0)
    assert not any(row.runs for row in bench.rows)
    assert [row.line().split("free")[1].strip() for row in bench.rows] == [
        "not run: time was up", "not run: time was up", "too large for this device",
    ]  # fmt: skip
