"""Tables of other libraries' names that we use beyond what these promise, so that missing ones can be reported.

A private name may go with any release. Each stands in a table with its reason: DeepSpeed's in
`frugal.deepspeed_adapter.contract`, torch's in `frugal.torch_internals`, transformers' in
`frugal.models.transformers_internals`, Liger's and Triton's in `frugal.models.fused.liger_internals`. Tables are
checked where training and dry runs start, and one error lists all missing names, instead of an AttributeError in the
middle of a step.
"""

import dis
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from types import CodeType
from typing import Any

from frugal.errors import RequestError


@dataclass(frozen=True)
class Required:
    """A name of another library that we use.

    Attributes:
        module: its full name.
        path: of the name in it, such as `Class.method`. `Class.name` is also an attribute that the class gives its
            instances; `function:name` one that the function gives any object, a parameter, or a string such as a key.
            Empty: the module itself, which is not imported to see.
        why: its purpose.
        form: of a function the parameters that we give, such as `(self, closure)`: its first ones, and more only if it
            can be called without them; of anything else its `repr`. None: any.
    """

    module: str
    path: str
    why: str
    form: str | None = None


def needed(place: str, why: str, *names: str) -> tuple[Required, ...]:
    """Return names with one reason, in a `module` or `module:Class`; behind each its form: `f(self, x)`, `NAME =
    "value"`."""
    module, _, owner = place.partition(":")
    table = []
    for name in names:
        path, equals, value = name.partition(" = ")
        path, bracket, parameters = path.partition("(")
        form = value if equals else f"({parameters}" if bracket else None
        table.append(Required(module, f"{owner}.{path}" if owner else path, why, form))
    return tuple(table)


TESTED = {
    "torch": ("2.13", "2.14", "2.15"),
    "deepspeed": ("0.19.6", "0.19.7", "0.19.8"),
    "transformers": ("5.20", "5.21", "5.22", "5.23", "5.24"),
    "bitsandbytes": ("0.50",),
    "liger-kernel": ("0.8",),
}
"""The versions that were tested, the newest last; docs/reference/versions.md says what ran on each. `5.23` is also
5.23.1. Others run, too, if they have all names: what is required are names."""


def untested(installed: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note for each library whose version, by name, was not tested."""
    return tuple(
        f"{library} {number} was not tested with frugal, as {', '.join(TESTED[library])} were: names that frugal needs "
        "are checked, but memory may differ"
        for library, number in installed.items()
        if not f"{number.partition('+')[0]}.".startswith(tuple(f"{each}." for each in TESTED[library]))
    )


def verify(library: str, table: Sequence[Required], *, title: str | None = None) -> None:
    """Refuse a version of a library that lacks a name in the table.

    Raises:
        RequestError: it lists the missing names.
    """
    if gaps := missing(table):
        raise RequestError(
            f"{title or library} {version(library)} is not supported",
            because=gaps,
            hint=f"pip install '{library}=={TESTED[library][-1]}.*'",
        )


def missing(table: Sequence[Required]) -> tuple[str, ...]:
    """Return the differences from the table, a line each."""
    return tuple(dict.fromkeys(gap for gap in map(_gap, table) if gap is not None))


def _gap(each: Required) -> str | None:
    try:
        if not each.path:
            there = each.module in sys.modules or importlib.util.find_spec(each.module) is not None
            return None if there else f"there is no module {each.module}"
        value: Any = importlib.import_module(each.module)
    except ImportError:
        return f"there is no module {each.module}"
    name, owner = each.module, value
    path, _, given = each.path.partition(":")
    for part in path.split("."):
        owner, value = value, getattr(value, _mangled(value, part), _ABSENT)
        if value is _ABSENT:
            is_given = isinstance(owner, type) and _mangled(owner, part) in _instance_attributes(owner)
            return None if is_given else f"{name} has no `{part}`"
        name += f".{part}"
    if given and given not in _named(_codes(value)):
        return f"{name} does not name `{given}`"
    return None if each.form is None or _holds(value, each.form) else f"{name} is {_form(value)}, not {each.form}"


_ABSENT = object()


def _mangled(owner: Any, name: str) -> str:
    """Return Python's name for one with two underscores that is private to a class."""
    is_private = name.startswith("__") and not name.endswith("__") and isinstance(owner, type)
    return f"_{owner.__name__.lstrip('_')}{name}" if is_private else name


@functools.cache
def _instance_attributes(owner: type) -> frozenset[str]:
    """Return the attributes that a class gives its instances: assigned in a method, or fields."""
    members = [member for base in owner.__mro__ for member in vars(base).values()]
    assigned = [name for member in members for name in _assigned(_codes(member))]
    return frozenset((*assigned, *getattr(owner, "__dataclass_fields__", ())))


def _form(value: Any) -> str:
    return f"({', '.join(parameters(value))})" if callable(value) else repr(value)


def parameters(function: Any) -> list[str]:
    """Return the names of a function's parameters, without its decorators."""
    return list(inspect.signature(_unwrapped(function)).parameters)


def _holds(value: Any, form: str) -> bool:
    """Return whether a value is as its form says, or a function that can be called with what is in it, in its order."""
    with suppress(TypeError):  # it needs others, takes fewer, or is no function
        bound = inspect.signature(_unwrapped(value)).bind(*form.strip("()").replace(",", "").split())
        return all(name == given for name, given in bound.arguments.items())
    return form == _form(value)


_WRAPPED = ("func", "init", "setstate")
"""Names under which decorators without `__wrapped__` hold what they are around: DeepSpeed's for NVTX, and what
`torch.compile` puts around methods of `nn.Module` for good."""


def _unwrapped(function: Any) -> Any:
    """Return a function without its decorators, also those that leave no `__wrapped__`."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name in set(names).intersection(_WRAPPED):
        inner = function.__closure__[names.index(name)].cell_contents
        return _unwrapped(inner) if callable(inner) and inner is not function else function
    return function


def _codes(member: Any) -> list[CodeType]:
    """Return a function's code, and that of the functions in it; none of what is no function."""
    code = member if isinstance(member, CodeType) else getattr(_unwrapped(member), "__code__", None)
    if code is None:
        return []
    return [code, *(inner for each in code.co_consts if isinstance(each, CodeType) for inner in _codes(each))]


def _named(codes: Sequence[CodeType]) -> set[str]:
    """Return the attributes that a function assigns, its variables and its strings."""
    strings = (constant for each in codes for constant in each.co_consts if isinstance(constant, str))
    return {*strings, *_assigned(codes), *(name for each in codes[:1] for name in each.co_varnames)}


def _assigned(codes: Sequence[CodeType]) -> Iterator[str]:
    """Yield the attributes that functions assign. From bytecode: reading sources would take a second."""
    for each in codes:
        extended, steps = 0, each.co_code
        for operation, argument in zip(steps[::2], steps[1::2], strict=True):
            argument |= extended
            extended = argument << 8 if operation == _EXTENDED_ARG else 0
            if operation == _STORE_ATTR:
                yield each.co_names[argument]


_STORE_ATTR, _EXTENDED_ARG = dis.opmap["STORE_ATTR"], dis.EXTENDED_ARG


def put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute that exists already.

    Raises:
        AttributeError: the installed version has none; a plain assignment would make one that nothing reads.
    """
    getattr(owner, name)
    setattr(owner, name, value)


def in_place_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function to be the method `name` of `owner` from now on; it gets the one before as first argument.

    Raises:
        AttributeError: the installed version has none of that name.
    """

    def replace(function: Callable[..., Any]) -> Callable[..., Any]:
        put(owner, name, functools.partial(function, getattr(owner, name)))
        return function

    return replace
