"""The table of fields that change nothing here, or that frugal does not follow: `known_fields.toml`."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from frugal.tools.check.documents.document import Tool
from frugal.tools.check.settings import Fields


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(files("frugal.tools.check.documents").joinpath("known_fields.toml").read_text())


def no_effect(tool: Tool, name: str = "no_effect") -> frozenset[str]:
    """Return the fields of a tool that change neither memory nor batch."""
    return frozenset(_table()[tool][name].split())


def finish(fields: Fields, *tools: Tool, prefix: str = "") -> None:
    """Note the fields that frugal does not follow, and list those that none of `tools` has."""
    for tool in tools:
        for key, what in _table()[tool].get(f"{prefix}deviations", {}).items():
            if fields.value(key) not in (None, False, 0, "none", [], {}):
                fields.settings.deviate(f"`{key}` is not followed: {what}", fields.place(key))
    fields.list_unknown(frozenset().union(*(no_effect(tool, f"{prefix}no_effect") for tool in tools)))
