"""A calibration replaces what is assumed of a device, and only of that device."""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from frugal.config.hardware import calibration
from frugal.config.hardware.calibration import Calibration, Probe, chosen, notes, read_all
from frugal.config.hardware.context import LATER_KERNELS_BYTES, NCCL_NVLINK
from frugal.config.schema import understand
from frugal.units import GIB, MIB

GPU = Calibration(
    kind="cuda", device="NVIDIA A100-SXM4-80GB", card="a100-80g", driver="580.95.05", torch="2.13.0", num_ranks=1,
    date="2026-11-20", command="frugal measure --calibrate",
    probe=Probe(
        matrix_flops={"bf16": 200e12, "fp16": 190e12, "fp32": 15e12}, memory_bandwidth=1.7e12, link_bandwidth=None,
        hop_seconds=None, operator_seconds=6e-6, host_bandwidth=8e10, host_link_bandwidth=2.4e10,
        context_bytes=523 * MIB,
    ),
)  # fmt: skip
CPU = replace(
    GPU, kind="cpu", device="some CPU", card=None, driver="", num_ranks=2,
    probe=replace(GPU.probe, matrix_flops={"bf16": 5e9, "fp32": 15e9}, memory_bandwidth=2e9, link_bandwidth=7e8,
                  hop_seconds=2e-4, host_bandwidth=6e9, host_link_bandwidth=None, context_bytes=None),
)  # fmt: skip


def test_measured_numbers_take_the_place_of_assumed_ones() -> None:
    (gpu,) = understand({"gpus": 1, "gpu": "a100-80g"}, GPU)[1].devices
    (assumed,) = understand({"gpus": 1, "gpu": "a100-80g"})[1].devices
    assert (gpu.context_bytes, gpu.matrix_flops, gpu.memory_bandwidth) == (523 * MIB, 200e12, 1.7e12)
    assert (gpu.operator_seconds, gpu.host_link_bandwidth, gpu.measured_on) == (6e-6, 2.4e10, "2026-11-20")
    assert (gpu.context_below_bytes, gpu.context_above_bytes) == (0, LATER_KERNELS_BYTES)
    saved = assumed.context_bytes + assumed.context_above_bytes - gpu.context_bytes - gpu.context_above_bytes
    assert gpu.usable_bytes - assumed.usable_bytes == saved


def test_each_precision_has_its_own_speed() -> None:
    (gpu,) = understand({"gpus": 1, "gpu": "a100-80g", "precision": "fp32"}, GPU)[1].devices
    assert gpu.matrix_flops == 15e12


def test_nccl_is_still_assumed_where_one_gpu_was_measured() -> None:
    gpu = understand({"gpus": 4, "gpu": "a100-80g"}, GPU)[1].devices[0]
    assert gpu.context_bytes == 523 * MIB + NCCL_NVLINK.planned
    assert gpu.context_below_bytes > 0 and gpu.context_above_bytes > LATER_KERNELS_BYTES
    gpu = understand({"gpus": 4, "gpu": "a100-80g"}, replace(GPU, num_ranks=4))[1].devices[0]
    assert (gpu.context_bytes, gpu.context_below_bytes) == (523 * MIB, 0)


def test_what_plans_took_too_much_is_left_free() -> None:
    (before,) = understand({"gpus": 1, "gpu": "a100-80g"}, GPU.of_plan(500 * MIB, 3 * GIB))[1].devices
    (after,) = understand({"gpus": 1, "gpu": "a100-80g"}, GPU.of_plan(540 * MIB, 5 * GIB))[1].devices
    assert before.margin_bytes == LATER_KERNELS_BYTES + 3 * GIB
    assert (after.margin_bytes, after.context_bytes) == (LATER_KERNELS_BYTES + 5 * GIB, 540 * MIB)
    assert before.context_bytes == 523 * MIB  # the probe had seen more


def test_cpu_ranks_divide_their_machine_anew() -> None:
    _, cluster, _ = understand({"gpus": 4, "mem": "2G", "device": "cpu", "precision": "fp32"}, CPU)
    assert (cluster.devices[0].matrix_flops, cluster.devices[0].memory_bandwidth) == (15e9 / 2, 1e9)
    assert (cluster.intra_bandwidth, cluster.links_measured) == (7e8, True)
    assert (cluster.hop_seconds, cluster.host_bandwidth) == (2e-4, 6e9)
    assert cluster.devices[0].context_bytes == 0


def test_a_plan_says_what_was_measured_and_when() -> None:
    _, cluster, _ = understand({"gpus": 1, "gpu": "a100-80g"}, GPU)
    assert notes(cluster) == [
        "context 523.0 MiB, 200 TFLOP/s, 1.7e+03 GB/s of memory, 6.0 microseconds an operator, 80 GB/s in an "
        "optimizer on the host, 24 GB/s to the host: as measured on this machine on 2026-11-20"
    ]
    assert notes(understand({"gpus": 1, "gpu": "a100-80g"})[1]) == []


def test_another_driver_torch_or_device_is_another_key() -> None:
    others = [replace(GPU, driver="570.1"), replace(GPU, torch="2.14.0"), replace(GPU, device="NVIDIA L4", card=None)]
    assert len({each.file_name for each in [GPU, *others]}) == 4


def test_the_newest_calibration_of_this_device_or_of_a_named_card_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "calibration_folder", lambda: tmp_path)
    monkeypatch.setattr(calibration, "library_versions", lambda: {"torch": "2.13.0"})
    monkeypatch.setattr(calibration, "cuda_driver", lambda: "580.95.05")
    newer = replace(GPU, driver="590.1", date="2026-11-21")
    for each in (newer, replace(GPU, torch="2.14.0"), replace(GPU, device="NVIDIA L4", card=None)):
        each.write(tmp_path)
    assert chosen({}, "NVIDIA A100-SXM4-80GB")[0] is None
    GPU.write(tmp_path)
    assert chosen({}, "NVIDIA A100-SXM4-80GB")[0] == GPU
    assert chosen({"gpu": "a100-80g"})[0] == newer
    assert chosen({"gpu": "h100-80g"})[0] is chosen({})[0] is None


def test_a_calibration_of_an_older_frugal_is_a_note_and_not_mistaken_for_a_new_one(tmp_path: Path) -> None:
    older = msgspec.json.decode(msgspec.json.encode(GPU))
    del older["probe"]["host_bandwidth"]  # its matrix FLOP/s were those of a whole layer
    (tmp_path / "cuda-0.json").write_bytes(msgspec.json.encode(older))
    found, (note,) = read_all(tmp_path)
    assert not found and note.endswith("is ignored: Object missing required field `host_bandwidth` - at `$.probe`")


def broken(name: str, value: bytes) -> bytes:
    """A calibration's file with another value of its probe."""
    return re.sub(f'"{name}":[^,}}]+'.encode(), f'"{name}":'.encode() + value, msgspec.json.encode(GPU))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'{"kind": "cuda"}', b"\xff\xfe", broken("bf16", b"0"), broken("memory_bandwidth", b"-1.0"),
     broken("operator_seconds", b"1e999"), broken("context_bytes", b"1000000000000")],
)  # fmt: skip
def test_a_damaged_file_is_a_note_and_the_others_are_read(content: bytes, tmp_path: Path) -> None:
    GPU.write(tmp_path)
    (tmp_path / "cuda-0.json").write_bytes(content)
    found, (note,) = read_all(tmp_path)
    assert found == [GPU]
    assert note.startswith(f"the calibration {tmp_path}/cuda-0.json cannot be read and is ignored: ")


@pytest.mark.parametrize(
    ("name", "value", "said"), [("memory_bandwidth", b"5e13", "50,000 GB/s"), ("bf16", b"6.3e15", "6,300 TFLOP/s")]
)
def test_a_calibration_that_no_device_reaches_is_ignored_with_its_numbers(
    name: str, value: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / "cuda-0.json").write_bytes(broken(name, value))
    found, (note,) = read_all(tmp_path)
    assert not found and f"{said} were measured" in note
