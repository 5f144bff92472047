"""`plan.json` is the whole plan, and cannot be changed unnoticed."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frugal.deepspeed_adapter.json_config import write_plan
from frugal.errors import FrugalError, PlanMismatchError, RequestError
from frugal.planning.plan import Plan
from tests.planning.synthetic import planned


def made(**settings: Any) -> Plan:
    asked: dict[str, Any] = {"gpus": 4, "mem": "24G"}
    return planned(**(asked | settings))


@pytest.mark.parametrize("settings", [{}, {"global_batch": 500}, {"mem": "4G"}, {"mem": "24G,24G,24G,40G"}])
def test_what_is_written_is_read_back_equal(settings: dict[str, Any], tmp_path: Path) -> None:
    plan = made(**settings)
    path, ds_config = write_plan(plan, tmp_path / "deep" / "er")
    assert Plan.read(path) == plan
    assert json.loads(ds_config.read_text())["train_batch_size"] == plan.batch.capacity
    assert sorted(file.name for file in path.parent.iterdir()) == ["ds_config.json", "plan.json"]


def test_the_same_request_gives_the_same_digest() -> None:
    assert made().digest == made().digest
    assert made().digest != made(global_batch=256).digest


def test_expandable_segments_are_part_of_the_plan_and_of_its_digest() -> None:
    with_them, without = made(), made(expandable_segments=False)
    assert json.loads(with_them.to_json())["strategy"]["expandable_segments"] is True
    assert not without.strategy.expandable_segments
    on_cpu = made(device="cpu", mem="64G")
    assert not on_cpu.strategy.expandable_segments
    assert replace(with_them, strategy=without.strategy).compute_digest() != with_them.digest


def changed(plan: Plan, *path: str | int, value: Any) -> bytes:
    """`plan.json` with one value changed by hand."""
    content = place = json.loads(plan.to_json())
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(content).encode()


def test_whole_numbers_where_floats_belong_do_not_look_like_a_change() -> None:
    plan = made(weight_decay=0, gradient_clipping=1)
    assert Plan.from_json(plan.to_json()) == plan


CHANGES: list[tuple[tuple[str | int, ...], Any, type[FrugalError], str]] = [
    (("request", "learning_rate"), 1.0, PlanMismatchError, "was changed after it was made\n  because its digest"),
    (("request", "grad_clip"), 1.0, PlanMismatchError, "was changed after it was made"),
    (("batch", "micro_batch_sizes", 0, 0), 9, PlanMismatchError, "was changed after it was made"),
    (("cluster", "nodes", 0, "count"), -1, PlanMismatchError, "was changed after it was made"),
    (("cluster", "nodes", 0, "count"), 1 << 40, PlanMismatchError, "was changed after it was made"),
    (("cluster", "nodes", 0, "count"), "two", PlanMismatchError, "was changed after it was made"),
    (("schema",), 99, PlanMismatchError, "has schema 99, this frugal reads schema 6"),
    (("batch", "micro_steps", 0, "count"), 9, RequestError,
     "contradicts itself\n  because the micro-batch sizes do not add up to the global batch"),
    (("memory", "total_bytes"), 1, RequestError, "contradicts itself\n  because the parts are not the whole"),
    (("batch", "world_size"), "four", RequestError,
     "is not a plan\n  because Expected `int`, got `str` - at `$.batch.world_size`"),
    (("request", "seq_len"), -1, RequestError,
     "is not a plan\n  because --seq-len is -1\n  because it must be at least 1\n\nhint"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "kind", "message"), CHANGES)
def test_a_plan_that_was_changed_or_whose_numbers_disagree_is_refused(
    path: tuple[str | int, ...], value: Any, kind: type[FrugalError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        Plan.from_json(changed(made(), *path, value=value), source="run/plan.json")
    assert str(caught.value).startswith(f"run/plan.json {message}")
    assert caught.value.exit_code == (4 if kind is PlanMismatchError else 2)


def test_a_plan_for_a_thousand_gpus_is_short_and_says_all() -> None:
    plan = made(gpus=8, nodes=128, global_batch=1_000_000)
    text = plan.to_json()
    assert len(text) < 100_000
    assert Plan.from_json(text) == plan
    written = json.loads(text)
    assert [node["count"] for node in written["cluster"]["nodes"]] == [128]
    assert written["batch"]["micro_batch_sizes"] is None
    assert sum(steps["count"] * sum(steps["samples"]) for steps in written["batch"]["micro_steps"]) == 1_000_000


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"plan"', b'{"train_batch_size": 8}', b"[" * 100_000]
)
def test_what_is_not_a_plan_is_refused_in_words(text: bytes) -> None:
    with pytest.raises(RequestError, match=r"plan\.json is not a plan"):
        Plan.from_json(text)


def test_a_missing_plan_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"cannot read the plan .*\n  because No such file(.*\n)*.*frugal plan -o DIR"
    ):
        Plan.read(tmp_path / "plan.json")


def test_a_full_disk_leaves_the_old_plan_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = made(), made(global_batch=64)
    path, _ = write_plan(old, tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RequestError) as caught:
        write_plan(new, tmp_path)
    assert caught.value.what == f"cannot write {tmp_path}"
    assert caught.value.because[0].startswith(f"{tmp_path}/plan.json: No space left on device (")
    assert caught.value.hint is not None and caught.value.hint.endswith(", or choose another folder with -o")
    assert Plan.read(path) == old
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_made_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"cannot write .*file/run\n  because .*file/run: Not a directory"):
        write_plan(made(), tmp_path / "file" / "run")
