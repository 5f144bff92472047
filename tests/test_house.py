"""The shape of the house: who may import whom, what is public, what is loaded when."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import frugal

ROOT = Path(frugal.__file__).parent
FLOORS = [
    "errors", "units", "config", "planning", "deepspeed_adapter", "distributed", "training", "dryrun", "launch", "cli",
]  # fmt: skip
"""From the ground up: a module imports from its own floor and from those below."""

HEAVY = {"torch", "deepspeed", "transformers", "datasets", "accelerate"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def floor_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path, *, at_import_time: bool = False) -> set[str]:
    """Full names of the modules a file imports, anywhere in it or only when it is itself imported."""
    tree = ast.parse(path.read_text())
    nodes: list[ast.AST] = list(ast.walk(tree))
    if at_import_time:
        nodes = [node for statement in tree.body if not _deferred(statement) for node in ast.walk(statement)]
        lazy = {inner for node in nodes if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
        nodes = [node for node in nodes if node not in lazy]
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _deferred(statement: ast.stmt) -> bool:
    """Functions, and what only type checkers read."""
    return isinstance(statement, ast.FunctionDef) or (
        isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
    )


DOORS = (ROOT / "__init__.py", ROOT / "__main__.py")  # these open to every floor


@pytest.mark.parametrize(
    "path", [path for path in modules() if path not in DOORS], ids=lambda path: str(path.relative_to(ROOT))
)
def test_imports_only_go_down(path: Path) -> None:
    own = FLOORS.index(floor_of(path))
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "frugal" and len(parts) > 1 and parts[1] in FLOORS:
            assert FLOORS.index(parts[1]) <= own, f"{path.name} reaches up to {name}"


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if floor_of(path) == "planning"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_planning_knows_neither_torch_nor_clock_nor_chance(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & (HEAVY | {"time", "datetime", "random", "subprocess"})


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if floor_of(path) in ("errors", "units", "config", "planning")]
    + [
        ROOT / "dryrun" / "client.py",
        ROOT / "dryrun" / "planner.py",
        ROOT / "cli" / "__init__.py",
        ROOT / "cli" / "options.py",
        ROOT / "cli" / "plan.py",
        ROOT / "cli" / "explain.py",
    ],
    ids=lambda path: path.name,
)
def test_planning_from_the_cache_needs_no_torch(path: Path) -> None:
    assert not {name.split(".")[0] for name in imported(path, at_import_time=True)} & HEAVY


def loaded_after(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter that ran `statement`."""
    program = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    )


def test_importing_frugal_loads_no_torch() -> None:
    assert not loaded_after("import frugal; frugal.plan; frugal.Plan; frugal.FrugalError") & HEAVY


def test_the_command_line_of_planning_loads_no_torch() -> None:
    assert not loaded_after("import frugal.cli.plan, frugal.dryrun.client") & HEAVY


def test_the_public_names_are_exactly_these() -> None:
    public = {"Engine", "FrugalError", "Plan", "__version__", "initialize", "plan"}
    assert set(frugal.__all__) == public == set(dir(frugal))
    assert all(getattr(frugal, name) is not None for name in public)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'frugal' has no attribute 'plann'"):
        frugal.plann  # noqa: B018  # the access is the test


def test_only_one_module_knows_deepspeeds_spelling() -> None:
    spelled = [path for path in modules() if "train_micro_batch_size_per_gpu" in path.read_text()]
    assert [path.name for path in spelled] == ["json_config.py"]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 500
    assert ast.get_docstring(ast.parse(text))
    assert not {"utils", "helpers", "common", "base", "manager", "misc"} & {path.stem, path.parent.stem}
