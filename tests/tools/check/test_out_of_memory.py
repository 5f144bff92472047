"""Messages of torch's that a GPU is out of memory: every wording is read, and the dry run knows who asked."""

from pathlib import Path

import pytest

from frugal.dryrun.pool import Pool
from frugal.errors import RequestError
from frugal.tools.check.checked import check
from frugal.tools.check.gather import gather
from frugal.tools.check.out_of_memory import read
from frugal.tools.check.report import report
from frugal.units import GIB, MIB

HERE = Path(__file__).parent
EMULATED = HERE / "logs" / "torch-2.13.txt"
"""Written by torch 2.13 on an emulated RTX 3060: gpt2 with DeepSpeed's default bucket, see docs/facts/cuda.md."""

WORDINGS = {
    "1.0": "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 1; 10.92 GiB total capacity; 8.57 GiB "
    "already allocated; 9.28 MiB free; 4.68 MiB cached)",
    "1.8": "RuntimeError: CUDA out of memory. Tried to allocate 264.00 MiB (GPU 1; 2.00 GiB total capacity; 788.51 MiB "
    "already allocated; 145.93 MiB free; 1.02 GiB reserved in total by PyTorch)",
    "2.1": "[default3]:torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 1 has a total "
    "capacty of 6.00 GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 "
    "GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting",
    "2.2": "[rank3]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 1 has a total "
    "capacity of 23.65 GiB of which 11.06 MiB is free. Including non-PyTorch memory, this process has 23.60 GiB memory "
    "in use. Of the allocated memory 22.90 GiB is allocated by PyTorch, and 194.87 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF",
}
SIZES = {  # asked, total, free, allocated, reserved and not allocated
    "1.0": (12.5 * MIB, 10.92 * GIB, 9.28 * MIB, 8.57 * GIB, 0),
    "1.8": (264 * MIB, 2 * GIB, 145.93 * MIB, 788.51 * MIB, 1.02 * GIB - 788.51 * MIB),
    "2.1": (1.7 * GIB, 6 * GIB, 0, 2.93 * GIB, 2.3 * GIB),
    "2.2": (22 * MIB, 23.65 * GIB, 11.06 * MIB, 22.9 * GIB, 194.87 * MIB),
}


@pytest.mark.parametrize("version", WORDINGS)
def test_the_wording_of_every_version_is_read(version: str, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(f"step 1\nstep 2\n{WORDINGS[version]}\n")
    message = read(log)
    asked, total, free, allocated, unallocated = SIZES[version]
    assert message.requested_bytes == pytest.approx(asked, abs=1)
    assert abs(message.requested_bytes - asked) <= message.rounding_bytes
    assert message.total_bytes == pytest.approx(total, abs=1)
    assert message.free_bytes == pytest.approx(free, abs=1)
    assert message.allocated_bytes == pytest.approx(allocated, abs=1)
    assert message.unallocated_bytes == pytest.approx(unallocated, abs=3)
    assert (message.gpu, message.rank) == (1, 3 if version >= "2" else None)
    assert str(message.place).endswith("log.txt:3")


def test_the_phase_is_that_of_the_traceback_of_the_same_rank(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(
        "[rank1]: Traceback (most recent call last):\n"
        "[rank0]: Traceback (most recent call last):\n"
        '[rank1]:   File "/venv/torch/autograd/graph.py", line 979, in _engine_run_backward\n'
        '[rank0]:   File "/venv/torch/optim/adamw.py", line 12, in step\n'
        f"[rank0]: {WORDINGS['2.2'].removeprefix('[rank3]: ')}\n"
        f"[rank1]: {WORDINGS['2.2'].removeprefix('[rank3]: ')}\n"
    )
    message = read(log)
    assert (message.rank, message.phase, message.num_ranks) == (0, "optimizer step", 2)


def test_a_log_without_such_a_message_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("all is well\n")
    with pytest.raises(RequestError, match="has no message of torch's that a GPU is out of memory"):
        read(log)


def test_a_message_of_this_torch_is_read_whole() -> None:
    message = read(EMULATED)
    assert (message.rank, message.gpu, message.phase) == (0, 0, "backward")
    assert message.requested_bytes == pytest.approx(1.54 * GIB, abs=1)
    assert message.others_bytes == pytest.approx((11.76 - 1.01 - 8.82 - 1.44) * GIB, abs=4)


@pytest.mark.exhaustive
def test_the_dry_run_knows_who_asked_and_how_much_was_alive(pool: Pool, tmp_path: Path) -> None:
    """The log is of a run of exactly this JSON, on one emulated card."""
    config = tmp_path / "ds.json"
    config.write_text(
        """{"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": true}}, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "overlap_comm": false}}"""
    )
    message = read(EMULATED)
    settings, documents = gather([config], {"model": "gpt2", "seq_len": 1024})
    hardware = {"gpus": 1, "mem": message.total_bytes}
    done = check(settings, documents, hardware, with_plan=False, message=message, pool=pool)
    first = done.askers[0]
    assert (first.phase, first.operator) == ("backward", "aten._log_softmax_backward_data.default")
    assert message.allocated_bytes is not None
    assert first.live_bytes == pytest.approx(message.allocated_bytes, rel=0.002)
    assert done.verdict is not None and not done.verdict.fits
    assert done.change is not None and done.change.fields == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert "that torch had reserved were free, but in pieces" not in report(done)  # 1.44 GiB is less than was asked
