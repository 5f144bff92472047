"""The Python state of objects like DeepSpeed's is put back, whatever they hold and whatever was done to it since."""

import enum
import random
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from frugal.deepspeed_adapter.stages import PythonState, within

Owner = type("Owner", (), {"__module__": "deepspeed.runtime.zero.imagined"})
Settings = type("Settings", (), {"__module__": "deepspeed.runtime.zero.config"})
Buffers = type("Buffers", (), {"__module__": "deepspeed.runtime.swap_tensor.imagined"})
Status = enum.Enum("Status", "OUT IN", module="deepspeed.runtime.zero.imagined")
KINDS: tuple[Callable[[], Any], ...] = (dict, OrderedDict, lambda: defaultdict(list), list, deque, set, Owner)


def leaf(draw: random.Random) -> Any:
    """A value that is not entered."""
    return draw.choice((draw.randrange(9), str(draw.random()), None, torch.zeros(1), Status.IN, print))


def add(owner: Any, value: Any, draw: random.Random) -> None:
    """Put a value somewhere in a container or an object."""
    key = f"at_{draw.randrange(12)}"
    if isinstance(owner, dict):
        owner[key] = value
    elif isinstance(owner, set):
        owner.add(key if not isinstance(value, torch.Tensor) else value)
    elif isinstance(owner, list | deque):
        owner.insert(draw.randrange(len(owner) + 1), value)
    else:
        setattr(owner, key, value)


def graph(draw: random.Random, size: int) -> list[Any]:
    """Containers and objects that hold each other, also in circles and within tuples; the first reaches others."""
    nodes = [Owner(), *(draw.choice(KINDS)() for _ in range(size))]
    for _ in range(4 * size):
        value = draw.choice(nodes)
        add(draw.choice(nodes), draw.choice((value, (value, leaf(draw)), leaf(draw))), draw)
    return nodes


def described(nodes: list[Any]) -> list[list[tuple[str, int]]]:
    """Return what each holds, by identity, with its order."""
    held = [each if isinstance(each, dict | list | deque | set) else vars(each) for each in nodes]
    return [
        [(str(key), id(value)) for key, value in each.items()] if isinstance(each, dict) else
        sorted(("", id(value)) for value in each) if isinstance(each, set) else [("", id(value)) for value in each]
        for each in held
    ]  # fmt: skip


def reached(root: Any) -> list[Any]:
    """Return what is to be put back: all that `root` reaches, found in another way."""
    found: list[Any] = []
    todo = [root]
    while todo:
        each = todo.pop(0)
        if not isinstance(each, (dict, list, deque, set, tuple, Owner)) or any(each is one for one in found):
            continue
        found.append(each)
        todo += vars(each).values() if isinstance(each, Owner) else each.values() if isinstance(each, dict) else each
    return [each for each in found if not isinstance(each, tuple)]


@pytest.mark.parametrize("seed", range(40))
def test_everything_reached_is_put_back(seed: int) -> None:
    draw = random.Random(seed)
    nodes = graph(draw, draw.randrange(1, 30))
    all_reached = reached(nodes[0])
    before, state = described(all_reached), PythonState(nodes[0])
    for _ in range(draw.randrange(1, 60)):
        node = draw.choice(all_reached)
        if draw.random() < 0.7:
            add(node, draw.choice((leaf(draw), graph(draw, 2)[0], draw.choice(nodes))), draw)
        elif isinstance(node, Owner):
            vars(node).pop(draw.choice([*vars(node), None]), None)
        elif node:
            node.clear() if draw.random() < 0.5 or isinstance(node, dict) else node.pop()
    for _ in range(2):  # also after another attempt that changed nothing
        state.put_back()
        assert described(all_reached) == before


def test_what_was_made_since_is_released() -> None:
    owner, gradient = Owner(), torch.zeros(3)
    owner.gradients = {}  # type: ignore[attr-defined]  # a made-up class
    state, alive = PythonState(owner), weakref.ref(gradient)
    owner.gradients[0], owner.norm = [gradient], gradient  # type: ignore[attr-defined]  # as above
    del gradient
    assert alive() is not None
    state.put_back()
    assert vars(owner) == {"gradients": {}}
    assert alive() is None


def test_states_that_have_another_half_elsewhere_are_left_alone() -> None:
    owner, stays, settings, buffers = Owner(), Owner(), Settings(), Buffers()
    vars(owner).update(stays=stays, settings=settings, buffers=buffers, function=test_what_was_made_since_is_released)
    state = PythonState(owner, apart=stays)
    for each in (stays, settings, buffers):
        each.value = 1
    state.put_back()
    assert [vars(each) for each in (stays, settings, buffers)] == [{"value": 1}] * 3


def test_tensors_within_are_found_once_a_place_and_not_in_what_is_apart() -> None:
    first, second, hidden = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    owner, coordinator = Owner(), Owner()
    vars(coordinator).update(hidden=hidden)
    vars(owner).update(bucket=[{"buffer": (first,)}], other={0: [second, 3]}, coordinator=coordinator)
    assert {id(each) for each in within(torch.Tensor, owner, apart=coordinator)} == {id(first), id(second)}
    assert {id(each) for each in within(torch.Tensor, owner)} == {id(first), id(second), id(hidden)}
