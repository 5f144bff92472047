"""The keyword arguments of `frugal.plan`: the table of settings."""

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from frugal.config.schema import PLAN_SETTINGS

_SHORT = {
    short.removeprefix("--").replace("-", "_"): name for name, row in PLAN_SETTINGS.items() for short in row.short
}
"""`lr` -> `learning_rate`."""


def in_full(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their full names, and paths as text."""
    return {
        _SHORT.get(name, name): os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in settings.items()
        if not (name in _SHORT and value is None)
    }


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `function` with every setting in place of `**settings`, for `help` and notebooks."""
    own = inspect.signature(function)
    named = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    named += [inspect.Parameter(name, keyword, default=row.default) for name, row in PLAN_SETTINGS.items()]
    return own.replace(parameters=named)
