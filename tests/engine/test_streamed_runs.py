"""Runs whose data is streamed: the same steps on one rank, and on three, killed and resumed on two."""

import itertools
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from bench.runs import frugal_train, prepared, records
from frugal.checkpoint import random_state
from frugal.config.run_settings import RunSettings
from frugal.data.batches import Position
from frugal.data.stream.samples import StreamBatches
from tests.data.stream.test_stream import chats, stream_of
from tests.engine.corpora import write_jsonl
from tests.engine.engines import plan_here, run_loop, running
from tests.engine.gradients import bound_of_losses
from tests.engine.small_models import tiny_gpt2

RATE = 1e-3  # with ten times that, plain fp32 on one processor is 1.6e-5 off after a step that goes too far


def small() -> torch.nn.Module:
    return tiny_gpt2(n_positions=256, vocab_size=260)


Alone = tuple[Path, list[float], list[list[int]], float]
"""The data, losses and samples of a run on one rank, and by how much the losses of other runs may differ."""


def batches_of(data: Path) -> StreamBatches:
    return StreamBatches(stream_of(f"{data}", shuffle_buffer=8), "causal-lm", global_batch=7)


def train(
    folder: Path, data: Path, micro_batch: int, *, die: bool = False, **changes: Any
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """The records of 8 steps on the chats in `data`, and a checksum of each sample of each step; runs on ranks."""
    drawn: list[list[int]] = []
    plan = plan_here(2, 7, micro_batch, {"learning_rate": RATE, "seq_len": 256})
    with running(plan, small()) as engine:
        random_state.seed_all(0)
        prepare = engine.prepare

        def noted(samples: Any) -> Any:
            drawn.append([zlib.crc32(sample["input_ids"].tobytes()) for sample in samples[:]])
            if die and len(drawn) == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return prepare(samples)

        engine.prepare = noted  # type: ignore[method-assign]  # to see what is trained on
        run_loop(engine, batches_of(data), RunSettings(**{"steps": 8, "save_every": 2, "out": folder} | changes))
    return records(folder), drawn


def losses(of: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in of if record["event"] == "step"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, one_rank: Ranks) -> Alone:
    """A run on one rank on 40 chats."""
    folder = tmp_path_factory.mktemp("alone")
    write_jsonl(folder / "chats.jsonl", chats(40))
    written, drawn = one_rank.run(train, folder / "1", folder / "chats.jsonl", 2)[0]
    assert len(drawn) == 8 and len({number for batch in drawn for number in batch}) == 40, "it begins a second epoch"
    batches = [batch[:] for batch in itertools.islice(batches_of(folder / "chats.jsonl").iterate(Position()), 8)]
    return folder / "chats.jsonl", losses(written), drawn, bound_of_losses(small, batches, learning_rate=RATE)


def test_a_stream_that_is_killed_on_three_ranks_goes_on_the_same_on_two(
    tmp_path: Path, alone: Alone, two_ranks: Ranks, three_ranks: Ranks
) -> None:
    data, expected, drawn, bound = alone
    with pytest.raises(AssertionError, match=r"died|failed") as killed:
        three_ranks.run(train, tmp_path / "killed", data, 3, die=True)
    assert (tmp_path / "killed" / "checkpoints").is_dir(), killed.value  # else it ended before its time
    resumed, rest = two_ranks.run(train, tmp_path / "killed", data, 2, resume=True)[0]
    done = 8 - len(rest)
    assert done in (2, 4) and rest == drawn[done:]
    assert losses(resumed) == pytest.approx(expected, rel=bound)


def test_frugal_train_says_how_it_streams(tmp_path: Path) -> None:
    write_jsonl(prepared(tmp_path, n_positions=256) / "chats.jsonl", chats(60))
    request = {"model": "config.json", "seq_len": 256}
    plan = plan_by_hand(world_size=1, global_batch=6, micro_batch=2, zero_stage=2, request=request)
    (tmp_path / "plan.json").write_bytes(plan.to_json())
    code, output, errors = frugal_train(
        tmp_path, "--plan", "plan.json", "--data", "chats.jsonl", "--stream", "--set", "train.shuffle-buffer=16",
        "--tokenizer", "byte", "--chat-template", "chatml", "--validation-data", "10%", "--steps", 12, "--out", "run",
    )  # fmt: skip
    assert (code, errors) == (0, "")
    assert "chats.jsonl is read while training, shuffled within 16 rows; 6 samples for validation" in output
    assert "of the first rows: 54 rows of messages" in output
    assert "the stream has ended: epoch 2 begins, in another order" in output
