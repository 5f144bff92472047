"""A run whose states live on disk trains as one whose states live in memory, and leaves nothing behind."""

import os
from pathlib import Path
from typing import Any

import pytest

from bench.ranks import Ranks
from tests.engine.engines import plan_here, running
from tests.engine.small_models import ragged_samples, tiny_gpt2
from tests.kernels import needs_nvme_io

WIDTH = 768  # its matrices reach the MiB below which DeepSpeed leaves parameters in memory

pytestmark = needs_nvme_io


def losses(**strategy: Any) -> tuple[list[float], int]:
    """Return the losses of three steps, and the number of files that were on disk then. Runs on ranks."""
    strategy = {"persistence_threshold_elements": 1000, "sub_group_elements": 3_000_000, **strategy}
    model = tiny_gpt2(n_embd=WIDTH, n_head=2, vocab_size=1024, n_positions=64).bfloat16()
    with running(plan_here(3, 2, 2, {"precision": "bf16", "learning_rate": 1e-3}, **strategy), model) as engine:
        found = [engine.train_step(ragged_samples(2, shortest=8, longest=16)).loss for _ in range(3)]
        folder = engine.plan.strategy.nvme_path
        return found, sum(len(files) for _, _, files in os.walk(folder)) if folder else 0


@pytest.mark.parametrize("parameters", ["none", "cpu", "nvme"])
def test_it_computes_the_same_from_disk(parameters: str, one_rank: Ranks, tmp_path: Path) -> None:
    ((in_memory, _),) = one_rank.run(losses, offload_optimizer="cpu")
    on_disk = {"offload_optimizer": "nvme", "offload_parameters": parameters, "nvme_path": str(tmp_path)}
    if parameters == "nvme":
        buffers = {"nvme_buffer_elements": 4 * WIDTH * WIDTH, "max_live_elements": 0, "prefetch_bucket_elements": 0}
        on_disk |= buffers  # type: ignore[arg-type]  # numbers among words
    ((losses_of_steps, num_files),) = one_rank.run(losses, **on_disk)
    assert losses_of_steps == in_memory
    assert num_files > 0
    assert list(tmp_path.iterdir()) == []
