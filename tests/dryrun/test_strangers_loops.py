"""Loops as people write them, with what else a script asks of a card, are dry-run as they are."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import frugal as package
from tests.commands import Capture, frugal

MIB = 1 << 20
WIDTH = 512
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def model() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).cuda()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def step_with_scaler(model: nn.Module, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(8, WIDTH, device="cuda")).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isnan(loss) or torch.isnan(norm).any() or model.weight.isinf().any().item():
        raise RuntimeError("the loss is not a number")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def step_with_averages(model: nn.Module, optimizer: Any) -> None:
    average, teacher = AveragedModel(model), copy.deepcopy(model).eval()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    (model(torch.randn(8, WIDTH, device="cuda")) - teacher(torch.ones(8, WIDTH, device="cuda"))).mean().backward()
    optimizer.step()
    schedule.step()
    average.update_parameters(model)


def step_with_generator(model: nn.Module, optimizer: Any) -> None:
    generator = torch.Generator(device="cuda").manual_seed(1)
    assert generator.device.type == "cuda" and torch.Generator().device.type == "cpu"
    assert isinstance(generator, torch.Generator)
    noise = torch.randn(8, WIDTH, device="cuda", generator=generator)
    noise = noise[torch.randperm(8, device="cuda", generator=generator)] * torch.empty_like(noise).normal_()
    generator.set_state(generator.get_state())
    model(noise.bernoulli_(0.5, generator=generator)).mean().backward()
    optimizer.step()


def step_with_workers(model: nn.Module, optimizer: Any) -> None:
    data = TensorDataset(torch.randn(16, WIDTH))
    sampler = RandomSampler(data, generator=torch.Generator())
    for (x,) in DataLoader(data, batch_size=8, sampler=sampler, num_workers=1, pin_memory=True):
        model(x.cuda(non_blocking=True)).mean().backward()
    optimizer.step()


def step_that_saves(model: nn.Module, optimizer: Any, path: Path = Path("checkpoint.pt")) -> None:
    model(torch.randn(8, WIDTH, device="cuda")).mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    before = torch.cuda.memory_allocated()
    loaded = torch.load(path, map_location=torch.device("cuda"))
    assert torch.cuda.memory_allocated() - before >= 3 * LAYER_BYTES and loaded["model"]["weight"].is_cuda
    assert not torch.load(path, map_location="cpu")["model"]["weight"].is_cuda
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def step_with_ranges(model: nn.Module, optimizer: Any) -> None:
    torch.cuda.nvtx.range_push("forward")
    with torch.cuda.nvtx.range("layer"), torch.profiler.record_function("layer"):
        loss = model(torch.randn(8, WIDTH, device=torch.accelerator.current_accelerator())).mean()
    torch.cuda.nvtx.range_pop()
    loss.backward()
    optimizer.step()
    statistics = torch.cuda.memory_stats()
    assert statistics["allocated_bytes.all.current"] == torch.cuda.memory_allocated() >= 4 * LAYER_BYTES
    assert (
        statistics["reserved_bytes.all.peak"] == torch.cuda.max_memory_reserved() and torch.accelerator.is_available()
    )


def step_compiled(model: nn.Module, optimizer: Any) -> None:
    torch.compile(model, mode="max-autotune")(torch.randn(8, WIDTH, device="cuda")).mean().backward()
    optimizer.step()


def step_of_two_networks(model: nn.Module, optimizer: Any) -> None:
    judge = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 1)).cuda()
    other = torch.optim.Adam(judge.parameters())
    fake = model(torch.randn(8, WIDTH, device="cuda"))
    x = fake.detach().requires_grad_()
    (slope,) = torch.autograd.grad(judge(x).sum(), x, create_graph=True)
    (judge(fake.detach()).mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
    other.step()
    judge(fake).mean().backward()
    optimizer.step()


def step_of_speech(model: nn.Module, optimizer: Any) -> None:
    logits = model(torch.randn(50, 8, WIDTH, device="cuda")).log_softmax(-1)
    lengths = torch.full((8,), 50), torch.full((8,), 12)  # on the host, as cuDNN takes them
    F.ctc_loss(logits, torch.ones(8, 12, dtype=torch.long, device="cuda"), *lengths).backward()
    packed = nn.utils.rnn.pack_padded_sequence(logits.detach(), torch.tensor([50] * 8))
    assert packed.data.is_cuda
    optimizer.step()


def step_with_masks_of_the_host(model: nn.Module, optimizer: Any) -> None:
    rows = torch.arange(8) % 2 == 0
    x = torch.randn(8, WIDTH, device="cuda")
    x[rows] = torch.ones(4, WIDTH, device="cuda")
    places = rows.nonzero().squeeze(1)
    assert x[rows].shape == x[places].shape == x[places.cuda()].shape == (4, WIDTH)
    assert x[:, torch.arange(WIDTH) < 5].shape == (8, 5) and x[x > 0].shape == (8 * WIDTH,)
    assert torch.arange(8).masked_select(rows).tolist() == [0, 2, 4, 6] and len(places.bincount()) == 7
    model(x.masked_fill_(x > 1, torch.tensor(0.0)))[rows, places].masked_fill(
        torch.ones(4, dtype=torch.bool, device="cuda"), torch.tensor(2.0)
    ).mean().backward()
    optimizer.step()


def step_of_words(model: nn.Module, optimizer: Any) -> None:
    """Pack sequences of unknown lengths, which an LSTM takes on the host."""
    lstm, lengths = nn.LSTM(WIDTH, WIDTH, batch_first=True).cuda(), torch.randint(1, 20, (8,), device="cuda")
    words = model(torch.randn(8, 20, WIDTH, device="cuda"))
    packed = nn.utils.rnn.pack_padded_sequence(words, lengths.cpu(), batch_first=True, enforce_sorted=False)
    out, (last, _) = lstm(packed)
    padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    assert padded.is_cuda and padded.shape == words.shape
    (padded.mean() + last.mean()).backward()
    optimizer.step()


STEPS = {name: value for name, value in list(globals().items()) if name.startswith("step_")}


@pytest.mark.parametrize("name", STEPS)
def test_it_runs_and_takes_what_its_optimizer_keeps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step: Callable[..., Any] = STEPS[name]
    figures = package.dry_run(step, model=model, optimizer=optimizer, gpu="t4-16g", steps=2)
    assert figures.categories["optimizer"] >= 2 * LAYER_BYTES
    assert figures.peak_allocated_bytes >= 4 * LAYER_BYTES


def test_nothing_that_a_script_was_shown_is_left() -> None:
    before = torch.Generator, torch.load, torch.accelerator.is_available, torch.cuda.nvtx.range_push
    package.dry_run(lambda x: x * 2, x=lambda: torch.ones(4, device="cuda"), gpu="t4-16g", steps=1)
    assert before == (torch.Generator, torch.load, torch.accelerator.is_available, torch.cuda.nvtx.range_push)


@pytest.mark.parametrize(("gpu", "processors", "knows_bf16"), [("t4-16g", 40, False), ("h100-80g", 132, True)])
def test_a_script_sees_the_properties_of_the_card(gpu: str, processors: int, knows_bf16: bool) -> None:
    seen: list[Any] = []

    def step(x: Tensor) -> None:
        seen.append(torch.cuda.get_device_properties(0).multi_processor_count)
        seen.append(torch.cuda.is_bf16_supported(including_emulation=False))

    package.dry_run(step, x=lambda: torch.ones(4, device="cuda"), gpu=gpu, steps=1)
    assert seen == [processors, knows_bf16]


def test_the_states_of_a_ctc_loss_are_counted() -> None:
    """`(samples, times, 2 targets + 1)` in forward, and again in backward, beside the gradient (LossCTC.cu)."""
    seen: list[int] = []

    def step(logits: Tensor) -> None:
        before = torch.cuda.memory_allocated()
        loss = F.ctc_loss(logits, torch.ones(64, 50, dtype=torch.long, device="cuda"), (200,) * 64, (50,) * 64)
        seen.append(torch.cuda.memory_allocated() - before)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss.backward()
        seen.append(torch.cuda.max_memory_allocated() - before)

    def logits() -> Tensor:
        return torch.zeros(200, 64, 30, device="cuda", requires_grad=True)

    package.dry_run(step, logits=logits, gpu="t4-16g", steps=1)
    states = 4 * 64 * 200 * 101
    assert seen[0] == pytest.approx(states, rel=0.01)
    assert seen[1] == pytest.approx(states + 4 * 200 * 64 * 30, rel=0.01)


SCRIPT = """
import argparse, json, torch

parser = argparse.ArgumentParser()
parser.add_argument("--config", type=open)
parser.add_argument("--size", type=int, default=1)
args = parser.parse_args()

def x():
    return torch.empty(json.load(args.config)["mib"] * args.size << 20, dtype=torch.uint8, device="cuda")

def step(x): ...
"""


def test_a_script_finds_its_arguments_and_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("config.json").write_text('{"mib": 3}')
    asked = ["dryrun", "train.py:step", "--gpu", "t4", "--json"]  # one GPU, of the only card of that name
    code, out, error = frugal(capsys, *asked, "--", "--config", "config.json", "--size", "2")
    assert code == 0, error
    assert json.loads(out)["peak_allocated_bytes"] == 6 * MIB
    code, _, error = frugal(capsys, "dryrun", "gpt2", "--gpus", "1", "--mem", "4G", "--", "--size", "2")
    assert code == 2 and error.startswith("error: gpt2 was given together with --size\n")
