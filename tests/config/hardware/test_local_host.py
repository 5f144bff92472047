"""GPUs that are found are planned with what other processes leave of them."""

from types import SimpleNamespace

from frugal.cli.options import described
from frugal.config.hardware.local_host import held
from frugal.config.schema import understand
from frugal.units import GIB, MIB

FIRST, SECOND = "0b4f1a2c-1111-2222-3333-444455556666", "9e0d1a2c-aaaa-bbbb-cccc-ddddeeeeffff"
ANSWER = f"GPU-{FIRST}, 3\nGPU-{SECOND}, 3277\nGPU-00000000-0000-0000-0000-000000000000, [N/A]\n"


def card(name: str, gib: float, uuid: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, total_memory=int(gib * GIB), uuid=uuid)


TWO = [card("NVIDIA A100-SXM4-40GB", 39.39, FIRST), card("NVIDIA A100-SXM4-40GB", 39.39, SECOND)]


def test_what_the_driver_itself_keeps_and_what_it_does_not_tell_is_left_out() -> None:
    assert held(ANSWER) == {SECOND: 3277 * MIB}
    assert held("NVIDIA-SMI has failed\n") == {}


def test_what_others_hold_is_taken_off_their_gpu_alone() -> None:
    settings, name = described(TWO, held(ANSWER), None)
    assert settings["held"] == [0, 3277 * MIB]
    assert (settings["gpu"], name) == ("a100-40g", "NVIDIA A100-SXM4-40GB")
    first, second = understand(settings)[1].devices
    assert first.usable_bytes - second.usable_bytes == 3277 * MIB


def test_a_larger_machine_of_this_kind_is_nobodys() -> None:
    settings, _ = described(TWO, held(ANSWER), 4)
    assert settings["gpus"] == len(settings["mem"]) == 4
    assert "held" not in settings


def test_cards_that_differ_are_named_one_by_one() -> None:
    settings, name = described([TWO[0], card("NVIDIA H100 80GB HBM3", 79.1, SECOND)], {}, None)
    assert (settings["gpu"], name) == ("a100-40g,h100-80g", None)
    assert "held" not in settings
