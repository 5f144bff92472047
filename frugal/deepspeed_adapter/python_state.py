"""The Python state of DeepSpeed's objects: attributes, counters and containers, found by walking instead of by name.

Between two optimizer steps, at rest, a shallow copy of all of it is taken, and put back where a global batch is given
up: every attribute is what it was, every container has the items that it had, and what was added since is released.

Left out: the elements of tensors, which DeepSpeed overwrites in the first micro-step or which `gradients.mend` makes
zero, and states whose other half is elsewhere: configurations, and buffers for disks.
"""

import functools
from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")

_CONTAINERS = (dict, list, set, deque, tuple)


def _contents(*roots: Any, apart: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container within `roots`, and the `vars` of each object of DeepSpeed's runtime, with a shallow copy:
    a dict of a dict, otherwise a list.

    `apart`: an object that is not entered.
    """
    seen, waiting = {id(apart)}, list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        held = each if isinstance(each, _CONTAINERS) else vars(each)
        copy: Any = dict(held) if isinstance(held, dict) else list(held)
        yield held, copy
        waiting += [item for item in _values(copy) if _is_entered(item.__class__)]


def _values(copy: Any) -> Any:
    return copy.values() if isinstance(copy, dict) else copy


@functools.cache
def _is_entered(kind: Any) -> bool:
    module = kind.__module__
    is_of_runtime = module.startswith("deepspeed.runtime.") and not issubclass(kind, Enum)
    return issubclass(kind, _CONTAINERS) or (is_of_runtime and "config" not in module and "swap_tensor" not in module)


class PythonState:
    """The Python state of DeepSpeed's objects at one moment. It holds no tensor that these do not hold at rest."""

    def __init__(self, *roots: Any, apart: Any = None) -> None:
        self._copies = [each for each in _contents(*roots, apart=apart) if not isinstance(each[0], tuple)]

    def put_back(self) -> None:
        """Make the state what it was. Tensors keep the elements that they have."""
        for held, copy in self._copies:
            held.clear()
            if isinstance(held, dict | set):
                held.update(copy)
            else:
                held.extend(copy)


def within(kind: type[T], root: Any, *, apart: Any = None) -> Iterator[T]:
    """Yield the objects of a type in the containers within `root` and in attributes of DeepSpeed's objects there."""
    for _, copy in _contents(root, apart=apart):
        yield from (each for each in _values(copy) if isinstance(each, kind))
