"""`frugal measure`: two real steps through DeepSpeed's launcher, beside their dry run."""

import getpass
import json
import pickle
import re
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import msgspec
import pytest

from bench.plans import plan_by_hand
from bench.recordings import shared
from frugal.cli import measure, run
from frugal.config.adapters import Lora
from frugal.config.hardware import local_host
from frugal.config.hardware.cluster import Node
from frugal.dryrun.compare import Figures, Measurement, SharedRow, _numbers
from frugal.engine.measure.record import ModelDefinition, RankMeasurement, Trial
from frugal.errors import OutOfMemoryError
from frugal.launch import local
from frugal.planning.plan import Plan
from frugal.units import GIB, MIB
from tests.commands import Capture
from tests.dryrun.test_measured import read

CONFIG = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 128,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def test_two_ranks_take_what_was_planned_and_it_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plan = plan_by_hand(
        world_size=2, global_batch=16, micro_batch=4, zero_stage=2, request={"model": "config.json", "seq_len": 32}
    )
    (tmp_path / "plan.json").write_bytes(plan.to_json())
    asked = ["--json", "--record", "measured", "--timeline", "both.pickle", "--share", "row.json"]
    command = [sys.executable, "-m", "frugal", "measure", "plan.json", *asked]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["peak_allocated_bytes"] == max(found["phases"].values()) == found["phases"][found["phase"]]
    assert found["predicted"]["peak_allocated_bytes"] == pytest.approx(found["peak_allocated_bytes"], rel=0.005)
    assert found["predicted"].keys() >= {"peak_reserved_bytes", "smallest_capacity_bytes", "categories", "phases"}
    assert found["host_before_bytes_per_node"] > found["host_bytes_per_node"] > found["peak_allocated_bytes"]
    (record,) = (tmp_path / "measured").iterdir()
    (tmp_path / "config.json").unlink()  # a record needs nothing but itself
    kept = read(record)
    assert (kept.plan_digest, kept.measured.peak_allocated_bytes) == (plan.digest, found["peak_allocated_bytes"])
    assert (kept.strategy, kept.batch, kept.cluster) == (plan.strategy, plan.batch, plan.cluster)
    assert kept.command.endswith(f" plan.json {' '.join(asked)}")
    text = (tmp_path / "row.json").read_text()
    assert text in done.stderr  # shown, all of it
    private = (getpass.getuser(), socket.gethostname(), "config.json", "plan.json", plan.digest, str(tmp_path))
    assert "/" not in text
    told = text.replace(local_host.cpu_name(), "")
    assert not [word for word in private if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", told)]
    row = msgspec.json.decode((tmp_path / "row.json").read_bytes(), type=SharedRow)
    assert row.measured.peak_allocated_bytes == found["peak_allocated_bytes"]
    assert (row.model["n_embd"], row.model["model_type"], row.num_ranks) == (64, "gpt2", 2)
    assert shared.figures(row)["allocated_error"] == pytest.approx(found["error"])
    snapshot = pickle.loads((tmp_path / "both.pickle").read_bytes())
    peaks = []
    for entries in snapshot["device_traces"]:
        live = accumulate(entry["size"] if entry["action"] == "alloc" else -entry["size"] for entry in entries)
        peaks.append(max(live))
    assert peaks == [found["predicted"]["peak_allocated_bytes"], found["peak_allocated_bytes"]]


def test_adapters_of_a_quantised_base_are_measured_on_a_cpu_rank(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"n_layer": 1}))
    request = {"model": "config.json", "seq_len": 32, "lora": Lora(rank=2, alpha=4.0), "quantize": "nf4"}
    plan = plan_by_hand(world_size=1, global_batch=4, micro_batch=4, zero_stage=2, request=request)
    (tmp_path / "plan.json").write_bytes(plan.to_json())
    command = [sys.executable, "-m", "frugal", "measure", "plan.json", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["predicted"]["peak_allocated_bytes"] == pytest.approx(found["peak_allocated_bytes"], rel=0.005)


def test_a_shared_row_has_no_word_that_a_user_chose(gpu: dict[str, int]) -> None:
    secret = {"model_type": "gpt2", "n_layer": 2, "_name_or_path": "/home/ada/secret", "id2label": {"0": "secret"}}
    assert run(["measure", "plan.json", "--share", "row.json"]) == 0
    measured = msgspec.json.decode(Path("row.json").read_bytes(), type=SharedRow)
    assert (measured.card, measured.measured.peak_reserved_bytes, measured.strategy.zero_stage) == ("a GPU", 4 * GIB, 0)
    assert _numbers(secret | {"text_config": {"n_embd": 8, "dtype": "secret"}}) == {
        "model_type": "gpt2", "n_layer": 2, "text_config": {"n_embd": 8}
    }  # fmt: skip


def test_of_the_host_a_cpu_rank_is_told_the_tensors_which_are_the_least_that_it_takes() -> None:
    kept = Path(__file__).parents[1] / "measured" / "gpt2-cpu-zero1-on-2-5bf0916d.json"
    *_, host, blank, what = measure._report(read(kept))
    assert re.fullmatch(r"host +> +[\d.]+ MiB +[\d.]+ MiB", host)
    assert (blank, what.partition("; ")[2]) == (
        "", "predicted are their tensors alone, without what malloc keeps and kernels take for a moment"
    )  # fmt: skip


GPU_BYTES, CONTEXT, MARGIN = 16 * GIB, 600 * MIB, 256 * MIB


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """Stands for a GPU whose runs take `needed` bytes of segments; in the folder a plan for it that expects 4 GiB.

    Its context is `context` bytes.
    """
    taken = {"needed": 4 * GIB, "context": CONTEXT}

    def start(plan: Plan, module: str, arguments: list[str], *, to_stderr: bool) -> int:
        assert to_stderr, "standard output is for what was measured"
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        if int(options.get("--cap", GPU_BYTES)) < taken["needed"]:
            return OutOfMemoryError.exit_code
        rank = RankMeasurement(
            phases={"forward": 3 * GIB}, reserved_bytes=taken["needed"],
            outside_bytes=taken["context"], device_bytes=GPU_BYTES, rss_before_bytes=GIB, rss_peak_bytes=2 * GIB,
        )  # fmt: skip
        definition = ModelDefinition(task="causal-lm", config={"model_type": "gpt2"})
        trial = Trial(ranks=(rank,), model=definition, device="a GPU", driver="580.1")
        Path(options["--out"]).write_bytes(msgspec.json.encode(trial))
        return 0

    figures = Figures(
        peak_allocated_bytes=3 * GIB, peak_reserved_bytes=4 * GIB, smallest_capacity_bytes=4 * GIB,
        categories={"parameters": 3 * GIB}, phases={"forward": 3 * GIB}, host_bytes_per_node=GIB, operator="mm",
        phase="forward",
    )  # fmt: skip
    monkeypatch.setattr(local, "check_machine", lambda cluster, port: None)
    monkeypatch.setattr(local, "start", start)
    monkeypatch.setattr(measure.DryRunSource, "dry_runs", lambda *_: [])
    monkeypatch.setattr(measure, "predicted", lambda *_, **__: figures)
    blank = plan_by_hand(world_size=1, global_batch=4, micro_batch=4, zero_stage=0)
    device = replace(
        blank.cluster.devices[0], kind="cuda", memory_bytes=GPU_BYTES, context_bytes=CONTEXT,
        margin_bytes=MARGIN,
    )  # fmt: skip
    cluster = replace(blank.cluster, nodes=(Node(devices=(device,)),))
    (tmp_path / "plan.json").write_bytes(replace(blank, cluster=cluster).sealed().to_json())
    monkeypatch.chdir(tmp_path)
    return taken


def test_a_gpu_is_told_in_the_allocators_and_the_drivers_words(gpu: dict[str, int], capsys: Capture) -> None:
    assert run(["measure", "plan.json", "--capped"]) == 0
    assert capsys.readouterr().out == (
        "                    predicted     measured\n"
        "forward              3.00 GiB     3.00 GiB   +0.000%\n"
        "allocated            3.00 GiB     3.00 GiB   +0.000%\n"
        "reserved             4.00 GiB     4.00 GiB   +0.000%\n"
        "context             600.0 MiB    600.0 MiB   +0.000%\n"
        "driver               4.59 GiB     4.59 GiB   +0.000%\n"
        "host                 1.00 GiB     1.00 GiB   +0.000%\n"
        "\nhost: growth of the processes, from 1.00 GiB on\n"
        "capped at the prediction, 4.00 GiB for tensors: enough\n"
    )


def test_a_prediction_in_which_the_run_does_not_fit_is_told_and_ends_with_5(
    gpu: dict[str, int], capsys: Capture
) -> None:
    gpu["needed"] += MIB
    assert run(["measure", "plan.json", "--capped", "--json"]) == OutOfMemoryError.exit_code
    found = json.loads(capsys.readouterr().out)
    assert found["capped"] == {"limit_bytes": 4 * GIB, "survived": False}
    assert (found["peak_reserved_bytes"], found["context_bytes"]) == (4 * GIB + MIB, CONTEXT)
    assert found["device_bytes"] == 4 * GIB + MIB + CONTEXT
    assert (found["device"], found["driver"], found["error"]) == ("a GPU", "580.1", 0.0)


@pytest.mark.parametrize(
    ("more", "remark"),
    [
        (112 * MIB, "the context takes 112.0 MiB more than planned, of a margin of 256.0 MiB"),
        (257 * MIB, "the context takes 257.0 MiB more than planned, beyond the margin of 256.0 MiB"),
    ],
)
def test_a_larger_context_is_told_apart_and_leaves_the_allocator_what_was_promised(
    gpu: dict[str, int], capsys: Capture, more: int, remark: str
) -> None:
    gpu["context"] += more
    assert run(["measure", "plan.json", "--capped"]) == 0
    capped, last = capsys.readouterr().out.splitlines()[-2:]
    assert capped == "capped at the prediction, 4.00 GiB for tensors: enough"
    assert last.startswith(remark)


def test_a_record_goes_where_the_tests_look_unless_told_otherwise(
    gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Measurement, "predict", lambda found, pool: found.predicted)
    assert run(["measure", "plan.json", "--record"]) == 0
    (record,) = (tmp_path / "tests" / "measured").iterdir()
    assert record.name.startswith("gpt2-cuda-zero0-on-1-")
    assert read(record).name == record.stem


def test_what_cannot_be_predicted_from_the_record_alone_is_not_recorded(
    gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    def other(found: Measurement, pool: object) -> Figures:
        return replace(
            found.predicted, peak_allocated_bytes=GIB, categories={"parameters": GIB}, phases={"forward": GIB}
        )

    monkeypatch.setattr(Measurement, "predict", other)
    assert run(["measure", "plan.json", "--record", "kept"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the measurement cannot be recorded\n") and "\nhint: a factory must be whole" in said
    assert "its peak is 1,073,741,824 bytes, from the plan 3,221,225,472\n" in said
    assert not (tmp_path / "kept").exists()


def test_cpu_ranks_cannot_be_capped(tmp_path: Path, capsys: Capture) -> None:
    plan = plan_by_hand(world_size=1, global_batch=4, micro_batch=4, zero_stage=0)
    (tmp_path / "plan.json").write_bytes(plan.to_json())
    assert run(["measure", str(tmp_path / "plan.json"), "--capped"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --capped was given, but the plan is for CPU ranks\n")
    assert said.endswith("hint: leave --capped out\n")
