"""The gauge sees what lives, and changes nothing by looking."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from frugal.memory_watch import gauge
from frugal.models.objectives import CausalLM
from tests.engine.small_models import tiny_gpt2

SEQ_LEN = 64


def test_a_tensor_counts_from_its_birth_to_its_death() -> None:
    with gauge("cpu") as found:
        tensor = torch.empty(1000)
        assert found.live_bytes == 4000
        view = tensor[10:]
        del tensor
        assert found.live_bytes == 4000
        del view
        assert found.live_bytes == 0
    assert found.peak_bytes == 4000


def test_views_of_older_tensors_and_tensors_of_other_devices_are_not_births() -> None:
    older = torch.empty(1000)
    with gauge("cpu") as found:
        kept = older[10:], torch.empty(1000, device="meta")
    assert found.peak_bytes == 0
    assert len(kept) == 2


def test_held_tensors_count_from_the_start() -> None:
    older = torch.empty(1000)
    with gauge("cpu", holding=[older, older[5:]]) as found:
        assert found.live_bytes == 4000
        del older
        assert found.live_bytes == 0


def test_each_phase_has_its_own_peak() -> None:
    with gauge("cpu") as found:
        kept = torch.empty(10)
        found.mark("forward")
        torch.empty(1000)
        found.mark("backward")
        torch.empty(20)
        found.mark("forward")
        torch.empty(500)
    assert found.phases == {"initialisation": 40, "forward": 4040, "backward": 120}
    assert kept.numel() == 10


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    objective = CausalLM()
    torch.manual_seed(1)
    losses = []
    for _ in range(num_steps):
        batch = {name: torch.randint(1, 200, (3, SEQ_LEN)) for name in objective.example(3, SEQ_LEN)}
        loss = objective.loss_sum(model, batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def llama() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("build", [tiny_gpt2, llama])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_is_bit_identical_with_and_without(build: Any, checkpointing: bool) -> None:
    results = []
    for watched in (False, True):
        model = build()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with gauge("cpu", holding=model.parameters()) if watched else nullcontext():
            losses = train(model, optimizer, 3)
        results.append((losses, [parameter.detach() for parameter in model.parameters()]))
    (losses, parameters), (watched_losses, watched_parameters) = results
    assert losses == watched_losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, watched_parameters, strict=True))


def test_a_gradient_that_someone_keeps_is_not_added_to() -> None:
    kept = []

    def gradients() -> list[torch.Tensor]:
        x = torch.ones(100, requires_grad=True)
        y = x * 2
        y.register_hook(lambda gradient: kept.append(gradient))
        parts = [y * 3, y * 5, y * 7]
        for part in parts:
            part.register_hook(lambda gradient: kept.append(gradient))
        sum(part.sum() for part in parts).backward()
        assert x.grad is not None
        return [x.grad, *kept]

    plain = [t.clone() for t in gradients()]
    kept.clear()
    with gauge("cpu"):
        watched = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


WHERE, ROWS = torch.randint(0, 70, (50, 30)), torch.tensor([1, 1, 3])
MOST = torch.arange(3500).view(50, 70) % 10 > 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: sum((x * float(i)).sum() for i in range(4)),
        lambda x: x.gather(1, WHERE).square().sum(),
        lambda x: x.topk(2).values.square().sum(),
        lambda x: x.max(1).values.square().sum(),
        lambda x: x.clamp(-0.5, 0.5).square().sum(),
        lambda x: x[ROWS].square().sum(),
        lambda x: x.index_put((ROWS,), torch.zeros(70)).square().sum(),  # the gradient that is written to is another's
        lambda x: x.scatter(1, WHERE, torch.ones(50, 30)).square().sum() + (x**3).sum(),
        lambda x: (x.scatter(1, WHERE, 0.0) + x).square().sum(),
        lambda x: x.scatter_add(1, WHERE, torch.ones(50, 30)).square().sum(),
        lambda x: x.cummax(1).values.square().sum(),
        lambda x: x.masked_select(MOST).square().square().sum(),
        lambda x: x.take(WHERE).square().sum(),
        lambda x: torch.nn.functional.silu(x).square().sum(),  # its backward is made of others, and has a kernel
        lambda x: torch.nn.functional.mish(x).square().sum(),
    ],
)  # fmt: skip
def test_autograd_writes_in_place_what_it_does_unwatched(function: Any) -> None:
    x = torch.randn(50, 70, requires_grad=True)
    gradients = []

    def step() -> None:
        function(x * 1.0).backward()
        assert x.grad is not None
        gradients.append(x.grad.sum())
        x.grad = None

    assert watched_peak(step) == pytest.approx(profiled_peak(step), abs=100)  # numbers become tensors of 8 bytes
    assert gradients[0] == gradients[1]


class PassesOperators(TorchDispatchMode):
    """A mode that runs operators as they come, as selective checkpointing does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class PassesFunctions(TorchFunctionMode):
    """A mode that calls functions as they come."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def inside_of(mode: Any, function: Callable[[], torch.Tensor]) -> torch.Tensor:
    with mode():
        return function()


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda linear, x: linear(x),
        lambda linear, x: linear(x.transpose(0, 1)),
        lambda linear, x: linear(x[:, 1:]),
        lambda linear, x: linear(x.view(5, 2, 5, 70).transpose(1, 2)),
        lambda linear, x: x.transpose(0, 1) @ linear.weight.t() + linear.bias,
        lambda linear, x: [part @ linear.weight.t() + linear.bias for part in (x, x.transpose(0, 1))][1],
        lambda linear, x: summed_by_one_line(linear, x, linear.bias),
        lambda linear, x: summed_by_one_line(linear, x, linear.bias + torch.ones(10, 5, 1)),
        *(
            lambda linear, x, mode=mode, inside=inside: inside_of(mode, lambda: inside(linear, x))
            for mode in (PassesOperators, PassesFunctions)
            for inside in (
                lambda linear, x: linear(x) + x[..., :1],  # as a layer adds its input
                lambda linear, x: x[..., :1] + linear(x.transpose(0, 1)).transpose(0, 1),
                lambda linear, x: linear(x.transpose(0, 1)),
                lambda linear, x: x.transpose(0, 1) @ linear.weight.t() + linear.bias,
            )
        ),
    ],
)
def test_a_bias_is_added_in_place_where_it_is_unwatched(function: Any, is_trained: bool) -> None:
    linear, x, results = torch.nn.Linear(70, 200), torch.randn(5, 10, 70), []

    def step() -> None:
        with torch.set_grad_enabled(is_trained):
            y = function(linear, x)
        gradients = torch.autograd.grad(y.square().sum(), [*linear.parameters()]) if is_trained else ()
        results.append([each.sum() for each in (y, *gradients)])

    assert watched_peak(step) == pytest.approx(profiled_peak(step), abs=100)
    assert all(torch.equal(*each) for each in zip(*results, strict=True))


def summed_by_one_line(linear: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a product plus its sum with another: one line, of two calls of one function, runs both."""

    def run(function: Any, *args: torch.Tensor) -> torch.Tensor:
        return function(*args)  # type: ignore[no-any-return]

    product = run(torch.matmul, x.transpose(0, 1), linear.weight.t())
    return product + run(torch.add, product, other)


def watched_peak(step: Any) -> int:
    gc.collect()
    with gauge("cpu") as found:
        step()
        return found.peak_bytes


def profiled_peak(step: Any) -> int:
    """The highest sum of the allocator's events that torch's profiler recorded: another source of truth."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, record_function("step"):
        step()
    events = recorded.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("build", [tiny_gpt2, llama])
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_the_gauge_agrees_with_the_profiler(build: Any, checkpointing: bool) -> None:
    model, objective = build(), CausalLM()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = objective.example(3, SEQ_LEN)

    def step() -> None:
        objective.loss_sum(model, batch).backward()
        for parameter in model.parameters():
            parameter.grad = None

    step()
    unseen = 2 * 5056 if checkpointing else 0  # the generator's state at two layers, which no operator returns
    assert watched_peak(step) == pytest.approx(profiled_peak(step), rel=0.002, abs=unseen)
