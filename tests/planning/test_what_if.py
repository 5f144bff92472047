"""What other clusters would come to is computed as a plan is, and said to be a prediction."""

from dataclasses import replace
from typing import Any

import pytest

from frugal.config.hardware.cluster import Cluster
from frugal.config.optimizers import Optimizer
from frugal.config.request import Request
from frugal.config.schema import understand
from frugal.errors import NothingFitsError, RequestError
from frugal.planning.plan import Plan, StepTime
from frugal.planning.report import Table, binding, explanation, strategy_table
from frugal.planning.what_if import (
    NOTHING_HELPS,
    axes_around,
    changes,
    cheaper_states,
    grid,
    improvements,
    most_helpful,
    parse_axes,
    predicted,
    shorter,
    what_helps_most,
    what_if_table,
    with_gpus,
    with_memory,
    without_pins,
)
from frugal.units import GIB
from tests.config.hardware.test_calibration import GPU
from tests.planning.synthetic import dry_running, planned

SMALL = {"parameters": 124_000_000, "flops_per_token": 8e8, "num_operators": 2500, "drafts": True}


def plan(model: dict[str, Any] | None = None, **settings: Any) -> Plan:
    return planned(model=SMALL | (model or {}), **settings)


@pytest.mark.parametrize("settings", [{"gpus": 8}, {"mem": "24G"}, {"seq_len": 512}, {"gpus": 1, "mem": "6G"}])
def test_a_prediction_is_what_a_plan_would_come_to(settings: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"gpus": 4, "mem": "12G"}
    before, after = plan(**asked), plan(**(asked | settings))
    key = (len(after.cluster.devices), after.cluster.devices[0].memory_bytes, after.request.seq_len)
    case = grid(before, {"gpus": key[:1], "mem": key[1:2], "seq-len": key[2:]})[key]
    assert (case.cluster, case.request) == (after.cluster, after.request)
    (found,) = predicted([case], dry_running(**SMALL))
    assert found is not None and found.batch is not None
    assert (found.strategy, found.batch, found.time) == (after.strategy, after.batch, after.time)


def test_what_would_help_is_computed_and_told_with_its_gain() -> None:
    made = plan(gpus=4, mem="6G", micro_batch=2)
    cases = [*changes(made), *shorter(made)]
    assert [case.name for case in cases] == [
        "no --micro-batch", "5 GPUs", "8 GPUs", "+4.00 GiB each", "links twice as fast",
        "--optimizer adamw-8bit (changes the numbers)", "--optimizer adamw,states=bf16 (changes the numbers)",
        "samples of 512",
    ]  # fmt: skip
    found = predicted(cases, dry_running(**SMALL))
    table = improvements(made, cases, found)
    assert table.title == "what would help (predicted, not dry-run)"
    for (name, _, change, batch, _), case, option in zip(table.rows, cases, found, strict=True):
        assert name == case.name.replace(" (changes the numbers)", " !") and option is not None
        assert option.batch is not None
        assert batch == f"{option.batch.largest_micro_batch} x {option.batch.accumulation_steps}"
        gain = option.seconds / case.request.seq_len / (made.time.total_seconds / made.request.seq_len)
        assert (f"{100 * (gain - 1):+.0f} %" in change) == (abs(gain - 1) > 0.02)
    assert table.rows[-1][-1] == "same strategy"
    assert table.note == "! changes the numbers; full, selective, offloaded: activation checkpointing"


def test_in_a_pipe_its_tables_take_at_most_100_columns() -> None:
    mixed = {**SMALL, "num_layers": 12, "drafts": True, "bytes_per_token": 3_000_000}
    made = plan(mixed, gpus=2, nodes=2, mem="12G")
    cases = [*changes(made), *shorter(made)]
    tables = [strategy_table(made), improvements(made, cases, predicted(cases, dry_running(**mixed)))]
    for table in tables:
        assert max(map(len, table.lines)) <= 100
        assert "".join("".join(table.lines).split()).count("ZeRO-") == sum("ZeRO-" in row[-1] for row in table.rows)


def test_what_helps_most_asks_least() -> None:
    """A pin that can go comes before hardware, a part more before twice the machine."""
    made = plan(gpus=4, mem="12G", micro_batch=1)
    cases = changes(made)
    predictions = predicted(cases, dry_running(**SMALL))
    assert [case.effort for case in cases] == [0, 1, 2, 1, 1, 2, 2]
    assert most_helpful(made, cases, predictions).startswith("no --micro-batch: a step of ")
    assert most_helpful(made, cases[1:4], predictions[1:4]).startswith("5 GPUs: a step of ")
    assert most_helpful(made, cases[2:3], predictions[2:3]).startswith("8 GPUs: a step of ")
    assert most_helpful(made, cases[:1], [None]) == "", "only a dry run could tell"
    slower = plan(gpus=3, mem="12G")
    others = [replace(case, effort=0) for case in changes(slower)[:1]]
    faster = replace(made, time=StepTime(**{name: part / 100 for name, part in vars(made.time).items()}))
    assert most_helpful(faster, others, predicted(others, dry_running(**SMALL))) == NOTHING_HELPS


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 1}, {"gpus": 1, "mem": "80G"}])
def test_the_most_helpful_change_is_found_without_those_that_take_more_effort(settings: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"gpus": 4, "mem": "12G"} | settings
    made, opened = plan(**asked), []
    source = dry_running(**SMALL)

    def opening(request: Request, cluster: Cluster) -> Any:
        opened.append((request, cluster))
        return source(request, cluster)

    cases = changes(made)
    helps = what_helps_most(made, opening)
    assert helps == most_helpful(made, cases, predicted(cases, source))
    efforts = {case.effort for case in cases if helps.startswith(f"{case.name}:")} or {2}
    wanted = [case for case in cases if case.effort <= min(efforts)]
    assert {request for request, _ in opened} == {case.request for case in wanted}
    assert max(cluster.world_size for _, cluster in opened) == max(case.cluster.world_size for case in wanted)


def test_pins_that_bind_are_named_as_help() -> None:
    pins: dict[str, Any] = {"zero_stage": 3, "activation_checkpointing": "full", "offload": "none"}
    names = [case.name for case in changes(plan(gpus=1, mem="80G", **pins))]
    assert names[:3] == ["no --zero-stage", "--activation-checkpointing auto", "--offload auto"]
    assert "links twice as fast" not in names, "one GPU talks to nobody"


def test_links_twice_as_fast_are_so_inside_a_node_and_between_nodes() -> None:
    made = plan(gpus=2, nodes=2, mem="12G")
    (case,) = (case for case in changes(made) if case.name == "links twice as fast")
    assert case.cluster.intra_bandwidth == 2 * made.cluster.intra_bandwidth
    assert case.cluster.inter_bandwidth == 2 * made.cluster.inter_bandwidth
    assert case.cluster.nodes == made.cluster.nodes


def test_what_does_not_fit_and_what_only_a_dry_run_could_tell() -> None:
    made = plan(gpus=4, mem="12G", offload="none")
    cases = changes(made)[1:2]
    fits_not = replace(cases[0], cluster=with_memory(made.cluster, GIB))
    (found,) = predicted([fits_not], dry_running(**SMALL))
    assert found is not None and not found.fits
    assert improvements(made, [fits_not], [found]).lines[1].endswith(" short")
    (unknown,) = predicted(cases, dry_running(**(SMALL | {"drafts": False})))
    assert improvements(made, cases, [unknown]).lines[1].endswith("only a dry run could tell")


def test_the_table_has_an_entry_for_every_case() -> None:
    made = plan(gpus=4, mem="12G", global_batch=64)
    axes = {**axes_around(made, longest=1024), **parse_axes(["gpus=1,4", "mem=2G,12G"])}
    assert axes == {"gpus": (1, 4), "mem": (2 * GIB, 12 * GIB), "seq-len": (512, 1024)}
    cases = grid(made, axes)
    found = dict(zip(cases, predicted(list(cases.values()), dry_running(**SMALL)), strict=True))
    lines = what_if_table(made, axes, found)
    assert lines[0] == "what if: a step of 64 samples (predicted, not dry-run)"
    assert [line for line in lines if line.startswith("samples of")] == [
        "samples of 512 tokens",
        "samples of 1024 tokens",
    ]
    begins = next(i for i, line in enumerate(lines) if line.startswith("  seconds a step"))
    lines = [*lines[:begins], " ".join(map(str.strip, lines[begins:]))]
    assert lines[-5].split() == ["1", "GPU", "4", "GPUs"]
    rows = [line for line in lines if line.split(" GiB")[0].strip() in ("2.00", "12.00")]
    assert len(rows) == 4 and sum(row.count("/s Z2") for row in rows) == sum(
        option.fits for option in found.values() if option
    )
    assert "o optimizer in host memory" in lines[-1], "2 GiB are too little without"


def test_a_cluster_of_other_size_has_margin_and_context_of_that_size() -> None:
    _, one, _ = understand({"gpus": 1, "mem": "12G"})
    _, four, _ = understand({"gpus": 4, "mem": "24G", "nodes": 2, "host_mem": "64G"})
    assert with_gpus(one, 4) == understand({"gpus": 4, "mem": "12G"})[1]
    assert (
        with_memory(with_gpus(four, 2), 6 * GIB)
        == understand({"gpus": 2, "mem": "6G", "nodes": 2, "host_mem": "64G"})[1]
    )


def test_a_measured_context_stays_when_there_are_more_gpus_and_nccl_is_added() -> None:
    measured = replace(GPU, slack_bytes=GIB)
    _, one, _ = understand({"gpus": 1, "gpu": "a100-80g"}, measured)
    assert with_gpus(one, 4) == understand({"gpus": 4, "gpu": "a100-80g"}, measured)[1]
    assert with_memory(one, 8 * GIB).devices[0].context_bytes == GPU.probe.context_bytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpu=4"], "`gpu=4` is no axis of a table"),
        (["gpus"], "`gpus` is no axis of a table"),
        (["gpus=1,x"], "`x` is no whole number"),
        (["seq-len=0"], "`seq-len=0` has a value below 1"),
        (["mem=12"], "`12` has no unit"),
    ],
)
def test_a_wrong_axis_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_axes(words)
    assert caught.value.what == message


def test_a_table_of_thousands_is_refused() -> None:
    made = plan(gpus=4, mem="12G")
    with pytest.raises(RequestError, match="a table of 900 cases takes too long"):
        grid(made, {"gpus": range(1, 31), "mem": range(GIB, 31 * GIB, GIB), "seq-len": (512,)})


def test_what_binds_is_told_with_the_phase_that_comes_next() -> None:
    made = plan(gpus=4, mem="12G")
    memory = replace(made.memory, phase_peaks={"forward": 7 * GIB, "backward": made.memory.live_bytes, "step": GIB})
    assert binding(replace(made, memory=memory)) == [
        "what binds",
        f"  {made.why[-1]}",
        "  the peak of a GPU is in backward (mm): 10.76 GiB of 11.33 GiB that may be used",
        "  most of it: activations 9.54 GiB (89%), context 508.0 MiB (5%), optimizer 354.8 MiB (3%)",
        "  next would be forward 3.27 GiB lower, step 9.27 GiB lower",
    ]


def test_the_host_is_told_where_something_lives_there() -> None:
    assert binding(plan({"parameters": 1_000_000_000}, gpus=4, mem="4G", host_mem="64G"))[-1] == (
        "  the host of a node holds 14.90 GiB of 64.00 GiB"
    )


def test_an_explanation_needs_nothing_but_the_plan() -> None:
    made = plan(gpus=4, mem="12G")
    text = explanation(made)
    assert explanation(Plan.from_json(made.to_json())) == text
    titles = [block.title if isinstance(block, Table) else block[0] for block in text[1:]]
    assert titles == ["what binds", "why", "strategies"]


BILLION = {"parameters": 1_000_000_000, "flops_per_token": 6e9, "num_operators": 3000, "drafts": True}


def test_states_that_cannot_be_had_are_not_offered() -> None:
    def flags(**settings: Any) -> list[str]:
        return [flag for flag, _ in cheaper_states(Request(**settings))]

    assert flags() == ["--optimizer adamw-8bit", "--optimizer adamw,states=bf16"]
    assert flags(precision="fp32") == ["--optimizer adamw-8bit"]
    assert flags(optimizer=Optimizer(name="sgd")) == ["--optimizer sgd,states=bf16"]
    assert flags(optimizer=Optimizer(implementation="foreach")) == [
        "--optimizer adamw,implementation=foreach,states=bf16"
    ]
    assert flags(offload="nvme", nvme_path="/scratch") == flags(optimizer=Optimizer(states="fp32")) == []


def test_where_nothing_fits_it_is_said_which_cheaper_states_would() -> None:
    with pytest.raises(NothingFitsError) as caught:
        plan(BILLION, gpus=1, mem="17.4G", offload="none")
    hint = str(caught.value).splitlines()[-1]
    assert hint.endswith(
        "--optimizer adamw-8bit (changes the numbers), "
        "or --optimizer adamw,states=bf16 (changes the numbers: updates below 1/256 of a weight may be lost)"
    )
    for optimizer in ("adamw,states=bf16", "adamw-8bit"):
        assert plan(BILLION, gpus=1, mem="17.4G", offload="none", optimizer=optimizer).memory.fits


def test_without_its_pins_a_request_is_free() -> None:
    made = plan(gpus=4, mem="12G", micro_batch=8, accumulation_steps=16, offload="optimizer:0.5")
    free = dict(without_pins(made.request))
    assert free["--offload auto"].offload_ratio is None
    both = free["no --micro-batch and no --accumulation-steps"]
    assert (both.micro_batch, both.accumulation_steps) == (None, None)
    assert "no --zero-stage" in dict(
        without_pins(replace(made.request, zero_stage=0, precision="fp32", offload="none", offload_ratio=None))
    )
