"""GPUs that are found are planned with what other processes leave of them."""

from types import SimpleNamespace

from frugal.cli.options import described
from frugal.config.hardware.cluster import GENERIC, unlike
from frugal.config.hardware.local_host import held
from frugal.config.schema import understand
from frugal.units import GIB, MIB

FIRST, SECOND = "0b4f1a2c-1111-2222-3333-444455556666", "9e0d1a2c-aaaa-bbbb-cccc-ddddeeeeffff"
ANSWER = f"GPU-{FIRST}, 3\nGPU-{SECOND}, 3277\nGPU-00000000-0000-0000-0000-000000000000, [N/A]\n"


def card(name: str, gib: float, uuid: str, *, processors: int = 108, minor: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, total_memory=int(gib * GIB), uuid=uuid, multi_processor_count=processors,
        max_threads_per_multi_processor=1536, major=8, minor=minor,
    )  # fmt: skip


TWO = [card("NVIDIA A100-SXM4-40GB", 39.39, FIRST), card("NVIDIA A100-SXM4-40GB", 39.39, SECOND)]


def test_what_the_driver_itself_keeps_and_what_it_does_not_tell_is_left_out() -> None:
    assert held(ANSWER) == {SECOND: 3277 * MIB}
    assert held("NVIDIA-SMI has failed\n") == {}


def test_what_others_hold_is_taken_off_their_gpu_alone() -> None:
    settings, name, unnamed = described(TWO, held(ANSWER), None)
    assert settings["mem"] == [TWO[0].total_memory, f"{TWO[1].total_memory}-{3277 * MIB}"]
    assert (settings["gpu"], name, unnamed) == ("a100-40g", "NVIDIA A100-SXM4-40GB", GENERIC)
    first, second = understand(settings)[1].devices
    assert first.usable_bytes - second.usable_bytes == 3277 * MIB


def test_a_larger_machine_of_this_kind_is_nobodys() -> None:
    settings, *_ = described(TWO, held(ANSWER), 4)
    assert settings["gpus"] == len(settings["mem"]) == 4
    assert not any("-" in str(size) for size in settings["mem"])


def test_cards_that_differ_are_named_one_by_one() -> None:
    settings, name, _ = described([TWO[0], card("NVIDIA H100 80GB HBM3", 79.1, SECOND)], {}, None)
    assert (settings["gpu"], name) == ("a100-40g,h100-80g", None)
    assert not any("-" in str(size) for size in settings["mem"])


def test_a_card_that_no_table_has_is_planned_as_its_driver_describes_it() -> None:
    new = card("NVIDIA RTX Strange", 10, FIRST, processors=20, minor=9)
    settings, _, unnamed = described([new], {}, None)
    (gpu,) = understand(settings, None, unnamed)[1].devices
    assert (gpu.name, gpu.compute_capability, gpu.resident_threads) == ("NVIDIA RTX Strange", (8, 9), 20 * 1536)
    (assumed,) = understand(settings)[1].devices
    assert gpu.context_bytes < assumed.context_bytes  # that of the largest card with no more memory
    *_, mixed = described([new, TWO[0]], {}, None)
    assert (mixed.compute_capability, mixed.resident_threads) == ((8, 0), 108 * 1536)


def test_only_a_gpu_that_may_take_more_than_was_planned_is_told() -> None:
    (gpu,) = understand({"gpus": 1, "mem": "12G"})[1].devices
    assert unlike(gpu, "NVIDIA GeForce RTX 3060", (8, 6), 28 * 1536) is None
    assert unlike(gpu, "NVIDIA GeForce RTX 4070", (8, 9), 46 * 1536) is None  # the same kernels
    assert unlike(gpu, "Tesla T4", (7, 5), 40 * 1024) == (
        "the plan is for a generic card with compute capability 8.6 and 104,448 threads at once, this is Tesla T4 with "
        "compute capability 7.5 and 40,960 threads at once: memory may differ, `frugal plan` on this machine plans "
        "for it"
    )
    assert unlike(gpu, "NVIDIA GeForce RTX 4090", (8, 9), 128 * 1536) is not None
