"""One hostfile serves DeepSpeed's launcher and frugal; what is wrong with a line is said with its number."""

from pathlib import Path
from typing import Any

import pytest

from frugal.config.hardware import cluster as cards
from frugal.config.hardware.build_cluster import parse_hostfile
from frugal.config.schema import understand
from frugal.errors import RequestError
from frugal.planning.report import summary
from frugal.units import GIB
from tests.planning.synthetic import SMALL, planned

TEXT = """\
# the old rack
node1 slots=4   # mem=12G gpu=rtx3060-12g host-mem=64G disk=500G
node2 slots=4   # mem=12G gpu=rtx3060-12g host-mem=64G disk=500G in the corner

fast  slots=2 gpu=a100-40g,a100-80g
"""


def test_deepspeed_reads_the_same_hosts_and_slots_from_the_same_file(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    path = tmp_path / "hosts"
    path.write_text(TEXT)
    assert dict(fetch_hostfile(str(path))) == {host.name: host.slots for host in parse_hostfile(TEXT)}


def test_nodes_may_differ_and_equal_ones_are_equal(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(TEXT)
    _, cluster, _ = understand({"hostfile": str(path), "host_mem": "32G"})
    one, two, fast = cluster.nodes
    assert one == two != fast
    assert [len(node.devices) for node in cluster.nodes] == [4, 4, 2]
    assert (one.host_memory_bytes, fast.host_memory_bytes) == (64 * GIB, 32 * GIB), "a line wins over a flag"
    assert (one.host_disk_bytes, fast.host_disk_bytes) == (500 * GIB, None)
    assert [device.name for device in fast.devices] == ["a100-40g", "a100-80g"]
    assert fast.devices[0].memory_bytes < fast.devices[1].memory_bytes
    assert cluster.intra_bandwidth == cards.CARDS["rtx3060-12g"].link_bandwidth, "the slowest in any node"


BAD: dict[str, tuple[str, str, str]] = {
    "no slots": ("node1\n", "line 1: `node1` is no host", "node1 slots=4  # mem=12G"),
    "no number of slots": ("\nnode1 slots=four", "line 2: `node1 slots=four` is no host", "node1 slots=4  # mem=12G"),
    "a host twice": ("a slots=1\nb slots=1\na slots=2", "line 3: a is there twice", "give it one line"),
    "a misspelt key": ("a slots=1 # men=12G", "line 1: unknown key `men`", "did you mean `mem`?"),
    "memory without a unit": ("a slots=1 # mem=12", "line 1: `12` has no unit", "12G is 12 GiB"),
    "too few amounts": ("a slots=4 # mem=12G,24G", "line 1: `mem` has 2 values for 4 slots", ""),
    "a flag for a name": ("-oProxyCommand=rm slots=1", "line 1: `-oProxyCommand=rm` is no name of a host", ""),
    "a name with a port": ("n1:2222 slots=1", "line 1: `n1:2222` is no name of a host", ""),
    "nobody": ("# nobody\n", "names no host", "write a line `NAME slots=GPUS`"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_with_its_line(case: str) -> None:
    text, what, hint = BAD[case]
    with pytest.raises(RequestError) as caught:
        parse_hostfile(text, source="hosts")
    assert caught.value.what.startswith("hosts") and caught.value.what.endswith(what)
    assert (caught.value.hint or "").startswith(hint)


def test_a_host_may_be_an_address_of_ipv6() -> None:
    text = "::1 slots=2\n[2001:db8::1] slots=1\nme@[2001:db8::2] slots=1\nfe80::1%eth0 slots=1\n10.0.0.1 slots=1\n"
    names = [host.name for host in parse_hostfile(text)]
    assert names == ["::1", "2001:db8::1", "me@2001:db8::2", "fe80::1%eth0", "10.0.0.1"]


def test_a_file_that_is_not_there_is_refused_in_words() -> None:
    with pytest.raises(RequestError, match="cannot read the hostfile /nowhere/hosts\n  because No such file"):
        understand({"hostfile": "/nowhere/hosts", "mem": "12G"})


@pytest.mark.parametrize(
    ("more", "what", "hint"),
    [
        ({"gpus": 2, "mem": "12G"}, "--gpus was given together with --hostfile", "leave one of them out"),
        ({"nodes": 2, "mem": "12G"}, "--nodes was given together with --hostfile", "leave one of them out"),
        ({}, "the memory of a GPU is not known", "write it behind the slots: NAME slots=4  # mem=12G"),
    ],
)
def test_what_contradicts_a_hostfile_or_is_in_neither_is_refused(
    more: dict[str, Any], what: str, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\n")
    with pytest.raises(RequestError) as caught:
        understand({"hostfile": str(path), **more})
    assert (caught.value.what, caught.value.hint) == (what, hint)


def test_the_report_counts_equal_nodes_and_says_what_each_kind_of_rank_takes(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(TEXT)
    lines = summary(planned(hostfile=str(path), global_batch=100, model=SMALL)).splitlines()
    assert (
        "cluster    2 nodes of 4 x rtx3060-12g with 12.00 GiB + "
        "1 node of 1 x a100-40g with 39.39 GiB and 1 x a100-80g with 79.15 GiB"
    ) in lines
    assert lines[0] == ("100 samples = 10 GPUs x 1 micro-step of 3 samples on 8 ranks, 38 samples on 2 ranks")
