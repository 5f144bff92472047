"""Other estimators are asked what they can express, and stand beside frugal on the same rows."""

import json

from bench.recordings import peers, predicted
from bench.recordings.questions import questions

ROWS = json.loads(predicted.RESULTS.read_text())["rows"]


def test_a_question_says_what_the_loop_of_its_row_is_written_from() -> None:
    asked = questions(ROWS)
    step = asked["h100-transformer-2.7b-ctx256-step"]
    assert (step["width"], step["layers"], step["samples"], step["length"]) == (2560, 32, 4, 256)
    assert (step["mode"], step["precision"]) == ("step", "fp32")
    assert asked["rtx-pro-6000-transformer-xl-ctx512-step-autocast"]["precision"] == "autocast"
    assert asked["l40s-llama-3.2-3b-lora-rank64"]["trained_elements"] == 9_175_040 * 2
    assert asked["t4-tinyllama-1.1b-eager-2x512"]["trained_elements"] == 9_011_200
    assert "linear-10000-50000-grad" not in asked


def test_a_peer_is_ranked_on_the_rows_that_it_answers() -> None:
    rows = [
        {"name": "a", "reserved_bytes": 100, "reserved_error": 0.01},
        {"name": "b", "reserved_bytes": None, "reserved_error": None, "allocated_bytes": 50, "allocated_error": -0.02},
        {"name": "c", "reserved_bytes": 100, "reserved_error": 0.5},
    ]
    found = peers.ranked(rows, {"a": 110, "b": 40, "c": "no adapter"})
    assert found["rows"] == 2 and found["cannot_express"] == {"no adapter": 1}
    assert (round(found["error"]["worst"], 6), round(found["error"]["lowest"], 6)) == (0.2, -0.2)
    assert found["frugal_error"]["worst"] == 0.02
    fitted = peers.ranked([{**row, "repository": row["name"]} for row in rows], {"a": 110, "b": 40, "c": "no"}, "b")
    assert fitted["rows"] == 1 and fitted["cannot_express"] == {"no": 1, "what it was fitted to": 1}


def test_the_kept_ranking_is_of_the_kept_predictions_and_is_the_table_of_the_documentation() -> None:
    kept = json.loads(peers.RESULTS.read_text())
    for name, of_peer in kept["peers"].items():
        answered = {row: answers[name] for row, answers in kept["answers"].items() if name in answers}
        assert of_peer == peers.ranked(ROWS, answered, peers.OWN.get(name))
    assert "\n".join([peers.BEGIN, *peers.table(kept), peers.END]) in peers.DOCS.read_text()
