"""A part of the optimizer on the device and the rest on the host: the same training, with checkpoints of both parts.

On CPU ranks the device is the host, and DeepSpeed then updates everything as the host's. By another name, `cpu:0`, it
takes the device's way: torch's AdamW beside its own CPU Adam.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from bench.ranks import Ranks
from frugal.checkpoint import loading, saving
from frugal.checkpoint.progress import Progress
from frugal.config.optimizers import Optimizer
from frugal.data.batches import Position
from frugal.deepspeed_adapter import kernels
from tests.checkpoint.test_reshard import END, STOP, bounds, started, steps
from tests.faults import disturbed
from tests.faults.disturbed import HALVING
from tests.kernels import needs_cpu_adam

pytestmark = needs_cpu_adam

Losses = list[tuple[float, float]]
ON_DEVICE: dict[str, Any] = {}
ON_HOST = {"strategy": {"offload_optimizer": "cpu"}, "request": {"optimizer": Optimizer(implementation="deepspeed")}}


def in_part(ratio: float) -> dict[str, Any]:
    return {"strategy": {"offload_optimizer": "cpu", "offload_ratio": ratio, "sub_group_elements": 4000}}


@contextmanager
def device_that_is_no_host() -> Iterator[None]:
    accelerator = get_accelerator()
    before, accelerator._name = accelerator._name, "cpu:0"
    try:
        yield
    finally:
        accelerator._name = before


def run(how: dict[str, Any], folder: Path | None = None, is_mended: bool = True) -> tuple[Losses, set[str], float]:
    """Losses and rates of five steps, with a checkpoint after three; where groups were updated; a sum of moments."""
    with device_that_is_no_host(), pytest.MonkeyPatch.context() as patch:
        if not is_mended:
            patch.setattr(kernels, "mend_partial_offload", lambda _optimizer: None)
        with started(3, **how) as engine:
            before, position = steps(engine, Position(), STOP)
            if folder is not None:
                saving.save(engine, folder, Progress(step=STOP, position=position))
            after, _ = steps(engine, position, END - STOP)
            places = set(getattr(engine.zero.optimizer, "subgroup_to_device", {}).values())
            moments = 0.0
            for parameter in engine.module.parameters() if is_mended else ():
                assert safe_get_full_fp32_param(parameter) is not None
                moments += safe_get_full_optimizer_state(parameter, "exp_avg_sq").double().sum().item()
    return before + after, places, moments


def resumed(folder: Path, how: dict[str, Any]) -> Losses:
    """Losses and rates of the last steps, from a checkpoint."""
    with device_that_is_no_host(), started(3, seed=1, **how) as engine:
        progress = loading.load(engine, folder).progress
        return steps(engine, progress.position, END - progress.step)[0]


def disturbed_in_part(where: str | None, halved: str = "") -> disturbed.Result:
    """A run with half of the optimizer on the device, out of memory once; on ranks."""
    with device_that_is_no_host():
        return disturbed.run(3, in_part(0.5)["strategy"], where, halved=halved)


def assert_equal(losses: Losses, others: Losses) -> None:
    assert [rate for _, rate in losses] == [rate for _, rate in others]
    assert [loss for loss, _ in losses] == pytest.approx([loss for loss, _ in others], rel=bounds()[0])


@pytest.mark.parametrize("ratio", [0.5, pytest.param(0.125, marks=pytest.mark.exhaustive)])
def test_it_trains_as_on_the_device_alone(ratio: float, two_ranks: Ranks) -> None:
    alone, _, moments = two_ranks.run(run, ON_DEVICE)[0]
    for losses, places, other_moments in two_ranks.run(run, in_part(ratio)):
        assert places == {"cpu", "cpu:0"}
        assert_equal(losses, alone)
        assert other_moments == pytest.approx(moments, rel=2 * bounds()[1])  # squares of gradients


@pytest.mark.exhaustive
def test_deepspeeds_own_part_on_the_device_ignores_the_schedule(two_ranks: Ranks) -> None:
    alone, *_ = two_ranks.run(run, ON_DEVICE)[0]
    unmended, *_ = two_ranks.run(run, in_part(0.5), None, False)[0]
    with pytest.raises(AssertionError):
        assert_equal(unmended, alone)


@pytest.mark.exhaustive
def test_a_checkpoint_holds_both_parts_and_goes_on_with_other_shares(two_ranks: Ranks, tmp_path: Path) -> None:
    whole, *_ = two_ranks.run(run, in_part(0.5), tmp_path / "half")[0]
    two_ranks.run(run, ON_HOST, tmp_path / "host")
    assert two_ranks.run(resumed, tmp_path / "half", in_part(0.5))[0] == whole[STOP:]
    assert_equal(two_ranks.run(resumed, tmp_path / "half", in_part(0.25))[0], whole[STOP:])
    assert_equal(two_ranks.run(resumed, tmp_path / "half", ON_DEVICE)[0], whole[STOP:])
    assert_equal(two_ranks.run(resumed, tmp_path / "host", in_part(0.5))[0], whole[STOP:])


@pytest.mark.parametrize(
    "fault",
    [
        "states",
        *(pytest.param(fault, marks=pytest.mark.exhaustive) for fault in ("writing", "later backward", "clipping")),
    ],
)
def test_out_of_memory_in_the_devices_part_leaves_no_trace(fault: str, two_ranks: Ranks) -> None:
    like = "training" if fault in HALVING else ""
    undisturbed = two_ranks.run(disturbed_in_part, None, like)[0]
    assert two_ranks.run(disturbed_in_part, fault, timeout=120)[0] == undisturbed
