"""The hosts on which a run resumes, and its part of the cluster."""

import dataclasses
from pathlib import Path

import pytest

from bench.plans import plan_by_hand
from frugal.config.hardware.build_cluster import parse_hostfile
from frugal.config.hardware.cluster import Cluster, Node
from frugal.config.hardware.local_host import versions
from frugal.config.run_settings import RunSettings
from frugal.errors import RequestError
from frugal.launch import host_report, hosts
from frugal.launch.host_report import UnreachableHost
from frugal.launch.hosts import part_of_cluster, usable_hosts
from tests.launch.test_hosts import report

NAMED = parse_hostfile("a slots=2\nb slots=3\nc slots=1\nd slots=1\ne slots=2\n")


def test_what_answers_and_works_is_left_and_the_rest_is_said() -> None:
    silent = "does not answer: ssh: connect to host c port 22: No route to host"
    reports = [
        report(cuda_devices=2, working_gpus=[0, 1]),
        report(cuda_devices=3, working_gpus=[0, 2]),
        UnreachableHost(silent),
        report(cuda_devices=1, working_gpus=[0], versions=versions() | {"torch": "2.12.1"}),
        report(cuda_devices=2, working_gpus=[]),
    ]
    left, lost = usable_hosts(NAMED, reports, "cuda")
    assert [(place.host.name, place.gpus) for place in left] == [("a", (0, 1)), ("b", (0, 2))]
    assert lost[0] == "left out: 1 of 3 GPUs of b: they do not work"
    assert lost[1] == f"left out: c {silent}"
    assert lost[2].startswith("left out: d has torch 2.12.1; ")
    assert lost[3] == "left out: e has no GPU that works"


def test_the_cluster_that_is_left_has_the_devices_that_are_left() -> None:
    device = plan_by_hand(world_size=1, global_batch=1, micro_batch=1, zero_stage=2).cluster.devices[0]
    kinds = [dataclasses.replace(device, name=name) for name in ("small", "large", "dear")]
    nodes = tuple(Node(devices=tuple(kinds[: host.slots]), host_memory_bytes=host.slots << 30) for host in NAMED)
    cluster = Cluster(nodes=nodes, intra_bandwidth=1e9, inter_bandwidth=2e9)
    reports = [
        UnreachableHost("is gone"),
        report(working_gpus=[0, 2]),
        UnreachableHost("is gone"),
        report(cuda_devices=1, working_gpus=[0]),
    ]
    left, _ = usable_hosts(NAMED[:4], reports, "cuda")
    kept = part_of_cluster(dataclasses.replace(cluster, nodes=nodes[:4]), NAMED[:4], left)
    assert [[each.name for each in node.devices] for node in kept.nodes] == [["small", "dear"], ["small"]]
    assert [node.host_memory_bytes for node in kept.nodes] == [3 << 30, 1 << 30]
    assert (kept.intra_bandwidth, kept.inter_bandwidth) == (1e9, 2e9)


@pytest.mark.parametrize(
    ("elastic", "what"), [(False, "not all hosts are ready"), (True, "no host is left to continue on")]
)
def test_hosts_that_stay_away_end_the_run_and_are_named(
    elastic: bool, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that cannot exist (RFC 6761) is a host that does not answer."""
    monkeypatch.setattr(hosts, "RETURN_SECONDS", 2.0)  # more than an attempt takes
    monkeypatch.setattr(hosts, "RETRY_SECONDS", 0.1)
    ask = host_report.collect_reports
    monkeypatch.setattr(host_report, "collect_reports", lambda *_: [report()])  # as it was when the run began
    plan = plan_by_hand(world_size=1, global_batch=1, micro_batch=1, zero_stage=2)
    named = parse_hostfile("nowhere.invalid slots=1\n")
    on = hosts.RestartableHosts(
        plan, named, RunSettings(out=tmp_path / "run"), None, (lambda _: plan) if elastic else None
    )
    monkeypatch.setattr(host_report, "collect_reports", ask)
    with pytest.raises(RequestError, match=what) as raised:
        on.plan_for_restart(plan)
    assert "nowhere.invalid " in raised.value.because[0]
    assert capsys.readouterr().err.startswith("waiting 0 minutes for nowhere.invalid, which ")
