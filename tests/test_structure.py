"""The structure of the package: who may import whom, what is public, what is loaded when, how large a part may be."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import frugal

TESTS = Path(__file__).parent
ROOT = Path(frugal.__file__).parent
FLOORS = [
    "errors", "units", "file_errors", "temporary", "files", "storages", "imports", "required", "config", "planning",
    "html", "report", "torch_internals", "memory_watch", "deepspeed_adapter", "distributed", "models", "data",
    "checkpoint", "engine", "integrations", "dryrun", "tools", "launch", "cli",
]  # fmt: skip
"""From the ground up: a module imports from its own floor and from those below."""

PUBLIC = (ROOT / "__init__.py", ROOT / "__main__.py")
"""The public face, which takes from every floor. Below it nothing imports `frugal` itself."""

HEAVY = {"torch", "deepspeed", "transformers", "datasets", "accelerate"}

MOST_STATEMENTS = 26_242
"""Of the package, docstrings apart. It rises only by what an issue allows: a feature in, a feature out."""

READ_THE_ENVIRONMENT = {
    "frugal.storages": "what a storage says is shown without the values of variables for credentials",
    "frugal.config.kernels": "TRITON_INTERPRET makes Triton run on CPU ranks, as tests have it",
    "frugal.deepspeed_adapter.kernels": "torch is told by TORCH_EXTENSIONS_DIR where to compile",
    "frugal.deepspeed_adapter.simulate.fake_device": "a dry run gives DeepSpeed the variables of its rank",
    "frugal.dryrun.planner": "`frugal.plan` says of this process, as `frugal plan` does, what a plan does not know",
    "frugal.dryrun.pool": "a worker process gets the environment of its parent, and a mark",
}
"""Modules outside `launch`, `distributed` and `cli` that may read `os.environ`, and why."""


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its full name; a folder goes by its own."""
    paths = sorted(ROOT.rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in paths
    }


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def floor_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def below(*floors: str) -> list[Path]:
    """All modules of some floors or folders, however deep."""
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in modules().values()}
    return [path for path, names in parts.items() if {names[0], "/".join(names[:2])} & set(floors)]


@cache
def imported(path: Path, *, at_import_time: bool = False) -> set[str]:
    """Full names of the modules a file imports, anywhere in it or only when it is itself imported."""
    tree = tree_of(path)
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


def named(path: Path) -> str:
    """The path below the package, for the names of tests."""
    return str(path.relative_to(ROOT))


# Who imports whom


def test_imports_only_go_down() -> None:
    up = [
        f"{named(path)} reaches up to {name}"
        for path in modules().values()
        if path not in PUBLIC
        for name in imported(path)
        if name.startswith("frugal.") and (floor := name.split(".")[1]) in FLOORS
        if FLOORS.index(floor) > FLOORS.index(floor_of(path))
    ]
    assert up == []


def import_graph() -> dict[str, set[str]]:
    """Return the modules that each module imports, also in functions and for type checkers."""
    return {name: {_module(target) for target in imported(path)} - {name, ""} for name, path in modules().items()}


def _module(name: str) -> str:
    """The module of the package that `name` is, or is a part of; empty: none."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter(import_graph()).prepare()  # otherwise CycleError names those that do


def roots(path: Path, *, at_import_time: bool = False) -> set[str]:
    """Top-level names of what a file imports."""
    return {name.split(".")[0] for name in imported(path, at_import_time=at_import_time)}


def test_config_and_planning_know_no_torch_and_planning_neither_clock_nor_chance_nor_processes() -> None:
    assert [named(path) for path in below("config", "planning") if roots(path) & HEAVY] == []
    world = {"time", "datetime", "random", "secrets", "uuid", "subprocess", "multiprocessing", "os"}
    assert [named(path) for path in below("planning") if roots(path) & world] == []


def names_deepspeed(tree: ast.Module) -> bool:
    """Return whether DeepSpeed is imported, anywhere, or one of its modules is named in a string, for whoever imports
    it."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(alias.name.split(".")[0] == "deepspeed" for alias in names):
                return True
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "deepspeed":
                return True
            case ast.Constant(value=str(text)) if re.match(r"deepspeed\.\w*", text):
                return True
            case ast.Call(func=function, args=[ast.Constant(value="deepspeed"), *_]):
                if ast.unparse(function).rpartition(".")[2] in ("import_module", "__import__"):
                    return True
    return False


@pytest.mark.parametrize(
    ("source", "is_seen"),
    [
        ("def work():\n    from deepspeed.runtime import engine", True),
        ("if TYPE_CHECKING:\n    import deepspeed.comm as comm", True),
        ("patch('deepspeed.utils.nvtx.enable_nvtx', False)", True),
        ("importlib.import_module('deepspeed')", True),
        ("from frugal.deepspeed_adapter import stages", False),
        ("version('deepspeed')", False),
    ],
)
def test_a_use_of_deepspeed_is_seen(source: str, is_seen: bool) -> None:
    assert names_deepspeed(ast.parse(source)) == is_seen


def test_only_the_adapter_names_deepspeed() -> None:
    users = {path for path in modules().values() if names_deepspeed(tree_of(path))}
    assert {floor_of(path) for path in users} == {"deepspeed_adapter"}, sorted(map(named, users))


def test_only_the_command_line_knows_click() -> None:
    assert {floor_of(path) for path in modules().values() if "click" in roots(path)} == {"cli"}


def test_the_environment_is_read_where_ranks_are_started_and_by_the_command_line() -> None:
    readers = {
        name
        for name, path in modules().items()
        if floor_of(path) not in ("launch", "distributed", "cli") and _reads_the_environment(tree_of(path))
    }
    assert readers == READ_THE_ENVIRONMENT.keys()


def _reads_the_environment(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in ("environ", "environb", "getenv", "putenv")
        and ast.unparse(node.value) == "os"
        for node in ast.walk(tree)
    )


def test_nothing_but_tests_imports_tests() -> None:
    paths = (path for folder in ("bench", "ds_configs", "frugal") for path in (ROOT.parent / folder).rglob("*.py"))
    assert [path for path in paths if "tests" in roots(path)] == []


# What is loaded when


LIGHT = (
    *below("errors", "units", "temporary", "files", "imports", "required", "config", "planning", "tools/check"),
    *(ROOT / name for name in (
        "dryrun/client.py", "dryrun/planner.py", "cli/__init__.py", "cli/options.py", "cli/plan.py", "cli/explain.py",
    )),
)  # fmt: skip


def test_planning_from_the_cache_needs_no_torch() -> None:
    assert [named(path) for path in LIGHT if roots(path, at_import_time=True) & HEAVY] == []


def loaded_after(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter that ran `statement`."""
    program = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import frugal; frugal.plan; frugal.Plan; frugal.FrugalError",
        "import frugal.cli.plan, frugal.dryrun.client",
        "import frugal.cli.train, frugal.launch.hosts, frugal.engine.run, frugal.distributed.process_group",
    ],
    ids=["the package", "the command line of planning", "whoever starts ranks, and a rank"],
)
def test_it_loads_no_torch(statement: str) -> None:
    """Also before a rank's environment is set: DeepSpeed chooses its accelerator when imported, torch its threads."""
    assert not loaded_after(statement) & HEAVY


# What is public


def test_the_public_names_are_exactly_these() -> None:
    public = {
        "CausalLM", "CheckpointError", "Engine", "FrugalError", "MeanLoss", "NothingFitsError", "NumbersError",
        "Objective", "OutOfMemoryError", "Plan", "PlanMismatchError", "PlannedMixin", "PlannedTrainer", "RequestError",
        "SummedLoss",
        "__version__", "dry_run", "heed_stop_signals", "initialize", "plan", "training_arguments",
    }  # fmt: skip
    assert set(frugal.__all__) == public == set(dir(frugal))
    assert all(getattr(frugal, name) is not None for name in public)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'frugal' has no attribute 'plann'"):
        frugal.plann  # noqa: B018  # the access is the test


def test_only_one_module_knows_deepspeeds_spelling() -> None:
    spelled = [path for path in modules().values() if "train_micro_batch_size_per_gpu" in path.read_text()]
    assert [path.name for path in spelled] == ["json_config.py"]


# How large and how named


def statements(tree: ast.Module) -> int:
    """Count the statements of a module, docstrings apart."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    texts = [each for each in nodes if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)]
    return len(nodes) - sum(isinstance(each.value.value, str) for each in texts)  # type: ignore[attr-defined]


def test_the_package_has_few_enough_statements() -> None:
    assert sum(statements(tree_of(path)) for path in modules().values()) <= MOST_STATEMENTS


MOST_PARAMETERS = 8
"""Of a function, its own object apart: what is passed together beyond that is an object with a name."""


def test_no_function_takes_many_parameters() -> None:
    functions = [
        (named(path), node.name, len([each for each in _parameters(node.args) if each not in ("self", "cls")]))
        for path in modules().values()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [each for each in functions if each[2] > MOST_PARAMETERS] == []


def _parameters(arguments: ast.arguments) -> list[str]:
    return [node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg)]


def test_a_folder_says_in_a_sentence_what_is_in_it_and_a_file_what_it_is() -> None:
    for path in modules().values():
        text = ast.get_docstring(tree_of(path))
        assert text, path
        assert path.name != "__init__.py" or (text.endswith(".") and "\n" not in text) or path.parent == ROOT, path
        assert not {"utils", "helpers", "common", "base", "manager", "misc"} & {path.stem, path.parent.stem}, path


HEADLESS = re.compile(r"(What|Whether|Of |That of|Those |None: )")


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """A sentence that a PyTorch user reads once has a head."""
    texts = [
        str(node.value.value)
        for path in modules().values()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    assert [text for text in texts if HEADLESS.match(text)] == []


def test_no_two_classes_have_the_same_name() -> None:
    nodes = (node for path in modules().values() for node in ast.walk(tree_of(path)))
    number = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name in number if number[name] > 1] == []


def test_a_bound_of_rounding_is_measured_or_says_its_reason() -> None:
    """One that a processor gave, another may miss: `tests.engine.gradients` measures it where the test runs."""
    bound = re.compile(r"((rel|abs|rtol|atol)=|< \(?)[\d.]+e-0?[5-8]\b")
    arithmetic = [TESTS / folder for folder in ("config", "planning", "tools/plan_page")]  # no tensors
    paths = [path for path in TESTS.rglob("*.py") if not set(path.parents) & set(arithmetic)]
    assert [
        f"{path.relative_to(TESTS)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if bound.search(line) and "#" not in line
    ] == []
