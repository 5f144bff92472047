"""Where no strategy fits, that is proven, and every way out that is named works."""

from pathlib import Path
from typing import Any

import pytest

from frugal.config.schema import understand
from frugal.errors import NothingFitsError
from frugal.planning.search.candidate import SearchResult
from frugal.planning.search.search import Search
from frugal.units import GIB
from tests.planning.synthetic import SMALL, SyntheticSource, last, planned

HOSTS = """
big slots=4    # mem=24G host-mem=64G
small slots=2  # mem=24G host-mem={}
"""


def test_each_node_is_held_against_its_own_ranks_and_host(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    wanted: dict[str, Any] = {"hostfile": str(hosts), "mem": "4G", "offload": "optimizer"}
    hosts.write_text(HOSTS.format("8G"))
    made = planned(**wanted)
    assert made.memory.host_bytes_per_node > 8 * GIB, "that is of four ranks, the small node has two"
    hosts.write_text(HOSTS.format("4G"))
    with pytest.raises(NothingFitsError) as caught:
        planned(**wanted)
    assert "because the host of 2 GPUs that has 4.00 GiB needs 4.97 GiB beside it" in str(caught.value)


def test_cpu_ranks_share_their_host() -> None:
    with pytest.raises(NothingFitsError, match=r"does not fit into a CPU rank of 2\.00 GiB"):
        planned(gpus=2, mem="2G", device="cpu")  # nothing is offloaded: it is the host
    budget: dict[str, Any] = {"gpus": 2, "device": "cpu", "mem": "20G", "model": SMALL}
    assert planned(**budget, host_mem="64G").memory.fits
    with pytest.raises(NothingFitsError) as caught:
        planned(**budget, host_mem="3G")
    assert "does not fit into a node's host memory" in str(caught.value)
    assert "2 such ranks and their processes take" in str(caught.value)


def test_what_lives_on_disk_must_fit_there(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    wanted: dict[str, Any] = {"hostfile": str(hosts), "mem": "24G", "offload": "nvme:/scratch"}
    hosts.write_text("a slots=2  # disk=100G\n")
    made = planned(**wanted)
    assert made.strategy.offload_optimizer == "nvme"
    assert not any("of disk free" in note for note in made.warnings)
    hosts.write_text("a slots=2  # disk=10G\n")
    with pytest.raises(NothingFitsError) as caught:
        planned(**wanted)
    assert str(caught.value).startswith("gpt2 does not fit into the disk of a node\n")


def test_activation_checkpointing_is_not_tried_where_the_states_alone_are_too_much() -> None:
    request, cluster, _ = understand({"gpus": 4, "mem": "4G"})
    source = SyntheticSource(request, cluster)
    found = last(Search(request, cluster, source))
    assert isinstance(found, SearchResult)
    hopeless = [rejected for rejected in found.rejected if rejected.reason.startswith("cannot fit")]
    assert {rejected.strategy.activation_checkpointing for rejected in hopeless} == {"full", "selective", "offloaded"}
    assert not {rejected.strategy for rejected in hopeless} & set(source.profiled)


def test_nothing_fits_is_told_as_a_proof() -> None:
    with pytest.raises(NothingFitsError) as caught:
        planned(gpus=1, mem="12G", offload="none", precision="fp32")
    assert str(caught.value) == (
        "gpt2 does not fit into a GPU of 12.00 GiB\n"
        "  because on the GPU alone ZeRO-0 lacks 5.67 GiB\n"
        "  because the nearest of 4 strategies is ZeRO-0, activation checkpointing offloaded, with 1 sample of 1024 "
        "tokens\n"
        "  because it takes 17.17 GiB: optimizer 11.18 GiB, gradients 3.73 GiB, parameters 1.86 GiB, "
        "context 332.0 MiB\n"
        "  because 513.2 MiB stay free as margin\n"
        "\n"
        "hint: this would fit: --offload auto, or --mem 18G, or --gpus 2"
    )


WIDE: dict[str, Any] = {"gpus": 4, "mem": "12G", "host_mem": "64G", "model": {"parameters": 8_000_000_000}}


@pytest.mark.parametrize(
    ("settings", "flag", "relaxed"),
    [
        ({"gpus": 4, "mem": "4G", "offload": "optimizer", "host_mem": "8G"}, "--host-mem 15G, or --nodes 2",
         {"host_mem": "15G"}),
        (WIDE | {"offload": "optimizer"}, "this would fit: --host-mem 120G", {"host_mem": "120G"}),
        (WIDE | {"offload": "optimizer", "zero_stage": 2}, "--mem 16.5G with --host-mem 120G",
         {"mem": "16.5G", "host_mem": "120G"}),
        ({"gpus": 1, "mem": "12G", "offload": "none"}, "--offload auto", {"offload": "auto"}),
        ({"gpus": 1, "mem": "12G", "offload": "none"}, "--mem 18G", {"mem": "18G"}),
        ({"gpus": 1, "mem": "12G", "offload": "none"}, "--gpus 2", {"gpus": 2}),
        ({"gpus": 4, "mem": "24G", "seq_len": 32768, "activation_checkpointing": "off"},
         "--activation-checkpointing auto", {"activation_checkpointing": "auto"}),
        ({"gpus": 4, "mem": "24G", "seq_len": 32768, "activation_checkpointing": "selective"},
         "--activation-checkpointing auto", {"activation_checkpointing": "auto"}),
        ({"gpus": 4, "mem": "24G", "seq_len": 32768, "activation_checkpointing": "off"},
         "--seq-len 16384", {"seq_len": 16384}),
        ({"gpus": 4, "mem": "12G", "micro_batch": 512, "global_batch": 2048, "offload": "none"}, "no --micro-batch",
         {"micro_batch": None}),
        ({"gpus": 4, "mem": "12G", "offload": "none", "accumulation_steps": 1, "global_batch": 2048},
         "no --accumulation-steps", {"accumulation_steps": None}),
    ],
)  # fmt: skip
def test_every_way_out_that_is_named_works(settings: dict[str, Any], flag: str, relaxed: dict[str, Any]) -> None:
    with pytest.raises(NothingFitsError) as caught:
        planned(**settings)
    assert flag in (caught.value.hint or "")
    assert planned(**(settings | relaxed)).memory.fits
