"""Modules whose forward returns a mean loss, drawn from seeds: what it takes, in which order, and what it returns."""

import random
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES, POSITIONS = 6, 5, 4

Out = make_dataclass("Out", ["logits", "loss"])

RETURNED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a number": lambda loss, logits: loss,
    "a tuple, loss first": lambda loss, logits: (loss, logits),
    "a tuple, loss last": lambda loss, logits: (logits, loss),
    "a list with a count": lambda loss, logits: [logits, loss, loss.detach()],
    "a dict": lambda loss, logits: {"logits": logits, "accuracy": loss.detach(), "loss": loss},
    "a dict of another name": lambda loss, logits: {"total": loss, "logits": logits},
    "a dataclass": lambda loss, logits: Out(logits, loss),
    "a namespace": lambda loss, logits: SimpleNamespace(logits=logits, loss=loss),
}
REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nothing": lambda loss, logits: None,
    "a float": lambda loss, logits: loss.item(),
    "no gradient": lambda loss, logits: loss.detach(),
    "logits": lambda loss, logits: logits,
    "logits, and no loss": lambda loss, logits: (logits, None),
    "two losses": lambda loss, logits: (loss, 2 * loss),
    "the accuracy first": lambda loss, logits: (loss.detach(), loss),
}
CALLED = ("by name", "as a dict", "by any name", "in order")
TARGETS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class MeanCase:
    """A module, and samples that it is trained on; some tokens of them may be no targets."""

    make: Callable[[], "Mean"]
    samples: list[dict[str, Tensor]]
    names: dict[str, str]
    words: str

    def plain_gradient(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the gradient of the mean loss of all samples in one batch, by PyTorch alone."""
        model = self.make().to(dtype)
        model.returned = lambda loss, logits: loss
        batch = torch.utils.data.default_collate(self.samples)
        values = {role: batch[name] for role, name in self.names.items()}
        cast = {role: value.to(dtype) if value.is_floating_point() else value for role, value in values.items()}
        model.outputs(**({"x": None, "targets": None, "scale": None} | cast)).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


class Mean(nn.Module):
    """An embedding or features, a layer and a mean loss."""

    def __init__(self, *, of_tokens: bool, returned: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Embedding(CLASSES, WIDTH) if of_tokens else nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        self.returned = returned

    def outputs(self, x: Tensor, targets: Tensor | None, scale: Tensor | None) -> Any:
        """Return what forward returns."""
        hidden = torch.tanh(self.first(x))
        logits = self.last(hidden if scale is None else hidden * scale.view(-1, *[1] * (hidden.dim() - 1)))
        if targets is None:
            return self.returned(logits.square().mean(), logits)
        return self.returned(F.cross_entropy(logits.flatten(0, -2), targets.flatten()), logits)


def of_names(called: str, names: dict[str, str]) -> type[Mean]:
    """Return a class whose forward takes values by these names, role by role, in this order."""
    by_name = ", ".join(f"{role}={name}" for role, name in names.items())
    of_batch = ", ".join(f"{role}=batch[{name!r}]" for role, name in names.items())
    takes, values = {
        "by name": (", ".join(names.values()), f"dict({by_name})"),
        "as a dict": ("batch", f"dict({of_batch})"),
        "by any name": ("**batch", f"dict({of_batch})"),
        "in order": ("*values", f"dict(zip({list(names)}, values))"),
    }[called]
    body = f"def forward(self, {takes}):\n return self.outputs(**(OTHERS | {values}))"
    made: dict[str, Any] = {}
    exec(body, {"OTHERS": dict.fromkeys(("x", "targets", "scale"))}, made)
    return type("Generated", (Mean,), made)


def draw_mean(seed: int, returned: dict[str, Callable[[Tensor, Tensor], Any]] = RETURNED) -> MeanCase:
    """Return the case of a seed, the same in every process."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    of_tokens, has_targets = draw.random() < 0.5, draw.random() < 0.8
    names = {"x": draw.choice(("x", "inputs", "features"))}
    names |= {"targets": draw.choice(TARGETS)} if has_targets else {}
    names |= {"scale": "scale"} if draw.random() < 0.5 else {}
    names = dict(draw.sample(list(names.items()), len(names)))
    called, (what, give) = draw.choice(CALLED), draw.choice(list(returned.items()))
    samples = []
    for _ in range(draw.randint(5, 9)):
        x = torch.randint(CLASSES, (POSITIONS,), generator=generator)
        targets = torch.randint(CLASSES, (POSITIONS,), generator=generator)
        if draw.random() < 0.6:  # also all of them
            targets[draw.randrange(POSITIONS) :] = -100
        values = {
            "x": x if of_tokens else torch.randn(POSITIONS, WIDTH, generator=generator), "targets": targets,
            "scale": torch.rand((), generator=generator),
        }  # fmt: skip
        samples.append({name: values[role] for role, name in names.items()})

    def make() -> Mean:
        torch.manual_seed(seed)
        return of_names(called, names)(of_tokens=of_tokens, returned=give)

    return MeanCase(make, samples, names, f"{seed}: takes {names} {called}, returns {what}")
