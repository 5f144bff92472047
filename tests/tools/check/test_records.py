"""A check for programs: JSON that says what the report says, SARIF that code hosts accept."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from frugal.dryrun.pool import Pool
from frugal.tools.check.checked import Check, check
from frugal.tools.check.gather import gather
from frugal.tools.check.report import as_json, as_sarif, report
from tests.commands import Capture, frugal

HERE = Path(__file__).parent
CONFIGS = HERE / "configs"
FLAGS = {"model": str(CONFIGS / "tiny-llama.json"), "seq_len": 64, "micro_batch": 4}


@pytest.fixture(scope="session")
def too_large(pool: Pool) -> Check:
    """DeepSpeed's default bucket on cards of 1 GiB."""
    settings, documents = gather([CONFIGS / "accelerate" / "zero2-offload.yaml"], FLAGS)
    return check(settings, documents, {"mem": "1G"}, with_plan=False, pool=pool)


@pytest.fixture(scope="session")
def log(too_large: Check) -> Any:
    return json.loads(as_sarif(too_large))


@pytest.mark.exhaustive
def test_a_bucket_that_is_too_large_is_what_the_smallest_change_makes_smaller(too_large: Check) -> None:
    content = json.loads(as_json(too_large))
    assert (content["verdict"], content["exit_code"]) == ("does not fit", 3)
    batch = {"global_batch": 16, "world_size": 2, "micro_batch": 4, "accumulation_steps": 2, "sequence_parallel": 1}
    assert content["batch"] == batch
    assert content["change"]["fields"]["zero_optimization.reduce_bucket_size"] == 20_000_000
    assert content["change"]["memory"]["headroom_bytes"] >= 0 > content["memory"]["headroom_bytes"]
    categories = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "temporary")
    parts = sum(content["memory"][name] for name in (*categories, "slack", "context"))
    assert parts == content["memory"]["total_bytes"]
    assert report(too_large).startswith("does not fit: ")


def validate(log: Any) -> None:
    """Hold a log to SARIF's own schema."""
    jsonschema = pytest.importorskip("jsonschema", reason="checks SARIF against its schema")
    schema = json.loads(lzma.decompress((HERE / "sarif-schema-2.1.0.json.xz").read_bytes()))
    jsonschema.validators.validator_for(schema)(schema).validate(log)


def test_sarif_is_valid_by_its_own_schema_and_each_result_has_a_rule(log: Any) -> None:
    validate(log)
    (run,) = log["runs"]
    rules, results = ({each[name] for each in of} for name, of in (
        ("id", run["tool"]["driver"]["rules"]), ("ruleId", run["results"]),
    ))  # fmt: skip
    assert {"does-not-fit", "large-bucket"} <= results <= rules
    assert all(result["message"]["text"] and result["locations"] for result in run["results"])


@pytest.mark.parametrize("words", ["nope.yaml", "a.yaml --gpus x", "a.yaml --bogus", "a.yaml --batch-size 4", ""])
def test_an_error_is_a_document_also_where_it_is_in_the_words_of_the_command(words: str, capsys: Capture) -> None:
    code, output, errors = frugal(capsys, "check", *words.split(), "--json")
    content = json.loads(output)
    assert (code, content["verdict"], content["exit_code"]) == (2, "error", 2) and errors.startswith("error: ")
    code, output, errors = frugal(capsys, "check", *words.split(), "--sarif")
    (result,) = json.loads(output)["runs"][0]["results"]
    if words == "nope.yaml":
        validate(json.loads(output))
    assert (code, result["ruleId"]) == (2, "error") and content["error"] in result["message"]["text"]
