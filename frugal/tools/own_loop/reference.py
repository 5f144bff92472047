"""Tell whether `FILE.py` or `FILE.py:NAME` on a command line trains, or is a factory of a model. No torch here."""

import ast
from pathlib import Path

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def names_a_step(reference: str) -> bool:
    """Return whether the function has required parameters, returns nothing, or runs a backward: it is a step then.

    A factory has none, and returns a module. A whole script is a step. Nothing of the file runs.
    """
    where, _, name = reference.rpartition(":")
    if not where.endswith(".py"):
        return reference.endswith(".py")
    try:
        tree = ast.parse(Path(where).expanduser().read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False  # its import reports what is wrong
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name == name
        and (
            len(node.args.posonlyargs + node.args.args) > len(node.args.defaults)
            or None in node.args.kw_defaults
            or _trains(node)
        )
        for node in tree.body
    )


def _trains(function: ast.AST) -> bool:
    """Return whether a function returns no value, or calls what runs a backward; functions inside it do not count."""
    own = set(ast.walk(function)).difference(
        *(ast.walk(each) for each in ast.walk(function) if isinstance(each, _SCOPES) and each is not function)
    )
    returns = any(isinstance(node, ast.Return) and node.value is not None for node in own)
    return not returns or any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in own)
