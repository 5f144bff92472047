"""A plan that was made with other versions of the libraries than those that train it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from bench.runs import frugal_train, plan, prepared, records
from frugal.config.hardware import local_host
from frugal.data.report import BuildReport
from frugal.dryrun.compare import proven_here
from frugal.engine.reports import opening
from frugal.errors import PlanMismatchError
from frugal.planning.plan import Plan

NUMBERS = st.builds("{}.{}.{}{}".format, *[st.integers(0, 30)] * 3, st.sampled_from(["", "+cpu", "+cu130"]))


@given(st.dictionaries(st.sampled_from(sorted(local_host.PACKAGES)), NUMBERS))
def test_versions_differ_where_their_public_numbers_do(recorded: dict[str, str]) -> None:
    here = local_host.versions()
    differ = [
        name for name in here if name in recorded and Version(recorded[name]).public != Version(here[name]).public
    ]
    said = local_host.other_versions(recorded)
    assert bool(said) == bool(differ)
    assert all((f"{name} {recorded[name]}" in said) == (name in differ) for name in recorded)


def test_another_build_of_the_same_torch_is_no_other_version() -> None:
    here = local_host.versions()
    built = here["torch"].partition("+")[0] + "+cu130"
    assert local_host.other_versions(here | {"torch": built}) == ""
    assert local_host.other_versions(here | {"torch": built.replace("+", ".post1+")}) != ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's config.json, text to train on, and a plan of earlier versions for one CPU rank."""
    folder = prepared(tmp_path_factory.mktemp("versions"))
    old = {**local_host.library_versions(), "deepspeed": "0.19.1", "transformers": "5.2.0"}
    (folder / "old.json").write_bytes(replace(plan(folder, 1), versions=old).sealed().to_json())
    return folder


def test_the_run_has_the_memory_of_a_dry_run_with_the_versions_that_train(folder: Path) -> None:
    code, _, errors = frugal_train(folder, "--plan", "old.json", "--data", "text.jsonl", "--steps", 2, "--out", "run")
    assert code == 0
    here = local_host.versions()
    (said,) = errors.splitlines()
    assert said.startswith(
        "note: the plan was made with deepspeed 0.19.1, transformers 5.2.0; installed here: deepspeed "
        f"{here['deepspeed']}, transformers {here['transformers']}; a dry run with these needs "
    )
    given, trained = Plan.read(folder / "old.json"), Plan.read(folder / "run" / "plan.json")
    assert trained.all_versions == here
    assert (trained.strategy, trained.batch, trained.request) == (given.strategy, given.batch, given.request)
    (memory,) = (record for record in records(folder / "run") if record["event"] == "memory")
    assert memory["measured_bytes"] == pytest.approx(trained.memory.live_bytes, rel=0.01)
    assert given.memory.live_bytes == 0, "nothing that the first plan had predicted"


def test_a_plan_that_does_not_fit_with_the_versions_that_train_is_refused(folder: Path) -> None:
    made = Plan.read(folder / "old.json")
    (node,) = made.cluster.nodes
    small = replace(node, devices=tuple(replace(device, memory_bytes=200_000) for device in node.devices))
    with pytest.raises(PlanMismatchError) as refused:
        proven_here(replace(made, cluster=replace(made.cluster, nodes=(small,))))
    assert refused.value.exit_code == 4
    assert refused.value.because[0].startswith("the plan was made with deepspeed 0.19.1, transformers 5.2.0; installed")
    assert refused.value.because[1].endswith(" MiB of 0.2 MiB; 0.0 MiB was planned")
    assert refused.value.hint == "make a new one with them: frugal plan -o DIR"


def test_of_samples_of_many_lengths_both_ends_are_dry_run(folder: Path) -> None:
    made = Plan.read(folder / "old.json")
    full, short = (proven_here(replace(made, batch=replace(made.batch, shortest=each))).memory for each in (None, 8))
    assert made.batch.largest_micro_batch == 2 and made.request.seq_len == 64
    assert short.logits == full.logits, "2 samples of 64 tokens, or 16 of 8"
    assert short.total_bytes >= full.total_bytes


def test_under_another_launcher_rank_0_says_it_in_one_line(folder: Path) -> None:
    made = Plan.read(folder / "old.json")
    data: Any = SimpleNamespace(training=range(9), report=BuildReport())
    said = [
        line for line in opening.remarks(made, data, torch.device("cpu"), 0) if "versions" in line or "made" in line
    ]
    assert len(said) == 1 and "deepspeed 0.19.1, transformers 5.2.0; installed here" in said[0]
