"""A parameter that ZeRO-3 has split is not read as if it were whole."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from bench.ranks import Ranks
from frugal.errors import RequestError
from frugal.models.objectives import SummedLoss
from tests.engine.engines import plan_here, running
from tests.engine.small_models import SkipNet, points, squared_error


def with_norm_before(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the error with the norm of all weights, as DeepSpeed dies of it in backward."""
    norm = sum(parameter.square().sum() for parameter in model.parameters())
    return squared_error(model, batch) + len(batch["x"]) * norm


def scaled_by_a_norm(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the error times a weight's norm: 0 under DeepSpeed's ZeRO-3, which says nothing."""
    return squared_error(model, batch) * next(iter(model.parameters())).detach().norm()


def scaled_by_a_size(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the error times the elements of a weight, 0 likewise."""
    return squared_error(model, batch) * next(iter(model.parameters())).numel()


def of_its_type(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the error, asking a parameter for what does not depend on its values."""
    parameter = next(iter(model.parameters()))
    return squared_error(model, {name: tensor.to(parameter.device, parameter.dtype) for name, tensor in batch.items()})


class ReadsItself(nn.Module):
    """A model that reads its own parameters in its forward, where DeepSpeed gathers a submodule's when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SkipNet()

    def forward(self, x: Tensor) -> Tensor:
        """Scale by the size of a weight."""
        return self.net(x) * self.net.first.weight.norm() / self.net.first.weight.numel()


def outcome(make: Callable[[], nn.Module], loss: Callable[..., Tensor], zero_stage: int) -> str | float:
    """Return the loss of a step, or what refuses it. Runs on ranks."""
    with running(plan_here(zero_stage, 4, 1), make(), SummedLoss(loss, example=points(1)[0])) as engine:
        try:
            return engine.train_step(points(4)).loss
        except RequestError as error:
            return str(error)


@pytest.mark.parametrize(
    ("loss", "operation"),
    [
        (scaled_by_a_norm, "detach"),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in ((with_norm_before, "square"), (scaled_by_a_size, "numel"))
        ),
    ],
)
def test_a_loss_that_reads_split_parameters_is_refused(
    loss: Callable[..., Tensor], operation: str, two_ranks: Ranks
) -> None:
    for said in two_ranks.run(outcome, SkipNet, loss, 3):
        assert said.startswith("ZeRO-3 has the parameter `first.weight` split where it is read\n")
        assert f"because `{operation}` takes it outside the forward of its module" in said
        assert "hint: read it in that module's forward, or use --zero-stage 2 or lower" in said
    two_ranks.close()  # what the refused step leaves behind


@pytest.mark.parametrize(("make", "loss"), [(SkipNet, of_its_type), (ReadsItself, squared_error)])
def test_others_train_as_at_stage_2(
    make: Callable[[], nn.Module], loss: Callable[..., Tensor], two_ranks: Ranks
) -> None:
    whole, split = (two_ranks.run(outcome, make, loss, stage)[0] for stage in (2, 3))
    assert split == pytest.approx(whole, rel=1e-5)  # the same sums in fp32, in another order
