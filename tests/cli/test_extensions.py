"""`frugal train` with a metric and a callback of the user's own."""

from pathlib import Path

import pytest

from bench.runs import frugal_train, prepared, records

MINE = """
import numpy as np

def accuracy(predictions, labels):
    return float((np.concatenate(predictions) == np.concatenate(labels)).mean())

class Told:
    def on_step(self, engine, step, result):
        if step == 4 and engine.rank == 1:
            engine.wants_to_stop = True
    def on_save(self, engine, step, folder):
        if engine.rank == 0:
            (folder.parent / "told").write_text(f"{step} {sorted(path.name for path in folder.iterdir())[0]}")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, text, plans, and a file of the user's own."""
    made = prepared(tmp_path_factory.mktemp("extensions"), 1, 2)
    (made / "mine.py").write_text(MINE)
    return made


def test_a_metric_is_recorded_and_said_and_a_callback_of_one_rank_stops_the_run(folder: Path) -> None:
    code, output, errors = frugal_train(
        folder, "--plan", "plan2.json", "--data", "text.jsonl", "--steps", 9, "--eval-every", 2,
        "--validation-data", "10%", "--out", "run", "--metric", "mine.py:accuracy",
        "--set", "train.callback=mine.py:Told",
    )  # fmt: skip
    assert (code, errors) == (0, "")
    where = folder / "run" / "checkpoints"
    assert output.splitlines()[-1] == f"told to stop: step 4 is saved in {where}, continue with --resume"
    measured = {record["step"]: record["metrics"] for record in records(folder / "run") if "metrics" in record}
    assert sorted(measured) == [2, 4]
    assert 0 <= measured[4]["accuracy"] <= 1
    assert f"  accuracy {measured[4]['accuracy']:.4g}  (" in output
    assert (folder / "run" / "checkpoints" / "told").read_text() == "4 layout_rank_0.json"
