"""Tell whether `FILE.py:NAME` on a command line is a training step or a factory of a model. No torch here."""

import ast
from pathlib import Path


def names_a_step(reference: str) -> bool:
    """Return whether the function has required parameters, which makes it a step; a factory has none.

    Nothing of the file runs.
    """
    where, _, name = reference.rpartition(":")
    if not where.endswith(".py"):
        return False
    try:
        tree = ast.parse(Path(where).expanduser().read_text())
    except (OSError, SyntaxError, ValueError):
        return False  # its import reports what is wrong
    return any(
        isinstance(node, ast.FunctionDef) and node.name == name and _num_required(node.args) > 0 for node in tree.body
    )


def _num_required(arguments: ast.arguments) -> int:
    positional = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    return positional + sum(default is None for default in arguments.kw_defaults)
