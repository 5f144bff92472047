"""The size of the package: figures that a change of its structure is judged by, of this tree or of a revision.

    python -m bench.house [REVISION]

Statements are `ast.stmt` without docstrings. Names are those of other libraries in tables (`frugal.required`). Upward
imports are those against the floors of the tree's own `tests/test_structure.py`.
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from graphlib import CycleError, TopologicalSorter
from io import BytesIO
from pathlib import Path
from typing import Any

HEADLESS = re.compile(r"(What|Whether|Of |That of|Those |None: )")
SURFACE = """
import json
from frugal.cli import COMMANDS, run
from frugal.config import schema
rows = schema.SETTINGS.values()
print(json.dumps({"settings": len(rows), "flags": sum(getattr(row, "is_flag", True) for row in rows),
                  "commands": len(COMMANDS)}))
"""


def main() -> None:
    """Print the figures as JSON."""
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        if revision := sys.argv[1:2]:
            packed = subprocess.run(["git", "archive", *revision], cwd=root, check=True, capture_output=True).stdout
            with tarfile.open(fileobj=BytesIO(packed)) as archive:
                archive.extractall(folder, filter="data")
            root = Path(folder)
        print(json.dumps(weigh(root), indent=1))


def weigh(root: Path) -> dict[str, Any]:
    """Return the figures of a tree."""
    paths = sorted((root / "frugal").rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in paths}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    texts = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = [text for text in (ast.get_docstring(node, clean=False) for node in texts) if text]
    names = [
        len(node.args) - 2
        for node in nodes
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "needed"
    ]
    scripts = [path for path in (root / "frugal").rglob("*.js") if "vendor" not in path.parts]
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    helped = _python(root, "import frugal.cli; frugal.cli.run(['train', '--help'])")
    structure = _structure(root)
    return {
        "lines": sum(path.read_text().count("\n") for path in paths),
        "modules": len(paths),
        "statements": sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in nodes),
        "docstring lines": sum(text.count("\n") + 1 for text in docstrings),
        "headless docstrings": sum(bool(HEADLESS.match(text.strip())) for text in docstrings),
        "lines of page scripts": sum(path.read_text().count("\n") for path in scripts),
        "lines of tests": sum(path.read_text().count("\n") for path in (root / "tests").rglob("*.py")),
        "names of other libraries": sum(names),
        **json.loads(_python(root, SURFACE)),
        "options of `frugal train --help`": len(re.findall(r"^  (?:-\w, )?--[\w-]+", helped, re.MULTILINE)),
        "words of docs": sum(len(path.read_text().split()) for path in pages),
        "circles of imports": _circles(structure.import_graph()),
        "upward imports": sum(
            structure.FLOORS.index(target.split(".")[1]) > structure.FLOORS.index(structure.floor_of(path))
            for path in paths
            if path not in structure.PUBLIC
            for target in structure.imported(path)
            if target.startswith("frugal.") and target.split(".")[1] in structure.FLOORS
        ),
    }


def _circles(graph: dict[str, set[str]]) -> int:
    """Return 1 if modules import each other in a circle, otherwise 0."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return 1
    return 0


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _python(root: Path, program: str) -> str:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{program}"]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def _structure(root: Path) -> Any:
    """Return the tree's own test of its structure as a module."""
    sys.path.insert(0, str(root))
    for name in [name for name in sys.modules if name.split(".")[0] == "frugal"]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location("structure", root / "tests" / "test_structure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
