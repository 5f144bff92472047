"""Every name of DeepSpeed that the package uses is in one table, which holds, and is checked before anything runs."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

import frugal
from frugal import required
from frugal.deepspeed_adapter import contract
from frugal.errors import RequestError
from frugal.required import in_place_of, needed

PACKAGE = Path(frugal.__file__).parent
ADAPTER = PACKAGE / "deepspeed_adapter"
TABLE = (*contract.NAMES, *contract.PUBLIC)
STAGE3 = "deepspeed.runtime.zero.stage3"
OPTIMIZER = f"{STAGE3}:DeepSpeedZeroOptimizer_Stage3"
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"


def test_every_name_is_there() -> None:
    assert required.missing(TABLE) == ()


ZERO3 = f"{STAGE3}.DeepSpeedZeroOptimizer_Stage3"


@pytest.mark.parametrize(
    ("module", "name", "gap"),
    [
        (OPTIMIZER, "_late_step", f"{ZERO3} has no `_late_step`"),
        (OPTIMIZER, "__lost", f"{ZERO3} has no `__lost`"),
        (OPTIMIZER, "_post_step.inner", f"{ZERO3}._post_step has no `inner`"),
        (OPTIMIZER, "_post_step(self)", f"{ZERO3}._post_step is (self, timer_names), not (self)"),
        (OPTIMIZER, "step:ipg_bucket", f"{ZERO3}.step does not name `ipg_bucket`"),
        ("deepspeed.runtime.zero.stage4", "step", "there is no module deepspeed.runtime.zero.stage4"),
        (
            "deepspeed.checkpoint.constants", "BASE_OPTIMIZER_STATE = 'base'",
            "deepspeed.checkpoint.constants.BASE_OPTIMIZER_STATE is 'base_optimizer_state', not 'base'",
        ),
    ],
)  # fmt: skip
def test_what_does_not_hold_is_told_exactly(module: str, name: str, gap: str) -> None:
    assert required.missing(needed(module, "a test", name)) == (gap,)


def test_what_a_class_gives_its_instances_counts() -> None:
    assert not required.missing(needed(OPTIMIZER, "a test", "fp32_partitioned_groups_flat"))
    assert not required.missing(needed(COORDINATOR, "a test", "__n_available_params"))


def test_another_deepspeed_is_refused_with_all_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = (*contract.NAMES, *needed(OPTIMIZER, "a test", "_late_step", "_step(self)"))
    monkeypatch.setattr(contract, "NAMES", lacking)
    monkeypatch.setattr(required, "version", lambda _library: "0.20.0")
    contract.verify.cache_clear()
    with pytest.raises(RequestError) as caught:
        contract.verify()
    contract.verify.cache_clear()
    assert str(caught.value) == (
        "DeepSpeed 0.20.0 is not supported\n"
        f"  because {ZERO3} has no `_late_step`\n  because {ZERO3} has no `_step`\n\n"
        "hint: pip install 'deepspeed==0.19.8.*'"
    )


def test_a_function_takes_the_place_of_one_that_is_there() -> None:
    owner = SimpleNamespace(step=lambda number: number + 1)

    @in_place_of(owner, "step")
    def step_twice(step: Callable[[int], int], number: int) -> int:
        return step(step(number))

    assert owner.step(1) == 3
    with pytest.raises(AttributeError, match="late_step"):
        in_place_of(owner, "late_step")(step_twice)


# What the adapter names is in the table


def known() -> set[str]:
    """Every part of every path in the table, and every module."""
    return {part for each in TABLE for part in re.split(r"[.:]", each.path)}


def modules() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def imported_of_deepspeed(tree: ast.Module) -> Iterator[str]:
    """Full names that a module imports of DeepSpeed, or reads of a module of DeepSpeed that it imports."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
            aliases |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            aliases |= {each.asname: each.name for each in node.names if each.asname and "deepspeed" in each.name}
            if any(each.name == "deepspeed" for each in node.names):
                aliases["deepspeed"] = "deepspeed"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield f"{aliases[node.value.id]}.{node.attr}"
    yield from (name for name in aliases.values() if name != "deepspeed")


def patched(tree: ast.Module) -> Iterator[str]:
    """Full names of DeepSpeed in strings: what is replaced for a dry run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and re.fullmatch(r"deepspeed(\.\w+)+", str(node.value)):
            yield str(node.value)


PATHS = {f"{each.module}.{each.path}".rstrip(".") for each in TABLE}
NAMES = {path.partition(":")[0] for path in PATHS} | {
    re.sub(r"\w+:", "", path)
    for path in PATHS  # what a class's method gives counts as the class's
}


def is_in_table(name: str) -> bool:
    """Return whether a full name is in the table, or a module of one that is, or below one that is."""
    parts = name.split(".")
    return any(other.startswith(f"{name}.") or other == name for other in NAMES) or any(
        ".".join(parts[:n]) in NAMES for n in range(3, len(parts))
    )


def test_what_is_imported_of_deepspeed_or_replaced_in_it_is_in_the_table() -> None:
    used = {
        f"{file} {name}"
        for file, tree in modules().items()
        for name in {*imported_of_deepspeed(tree), *patched(tree)}
        if "contract.py" not in file and not is_in_table(name)
    }
    assert used == set()


def private_attributes(tree: ast.Module) -> set[str]:
    """Attributes with an underscore that a module reads of others than itself, also by name in a string."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in _OURSELVES):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)
    return {re.sub(r"^_[A-Z]\w*?__", "__", name) for name in names if re.match(r"_[a-zA-Z]", name)}


_OURSELVES = ("self", "cls")


def own_names() -> set[str]:
    """Return what the adapter itself calls so."""
    names = set()
    for path in ADAPTER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _OURSELVES:
                names.add(node.attr)
    return names


OF_OTHERS = {
    "_cdata", "_C", "_DisableTorchDispatch", "_buffers", "_orig_mod", "_parameters",  # torch
    "_fields",  # named tuples
    "_getframe",  # sys
}  # fmt: skip


def test_private_attributes_of_deepspeed_in_the_adapter_are_in_the_table() -> None:
    fine = known() | own_names() | OF_OTHERS
    used = {
        f"{path.name} {name}"
        for path in ADAPTER.rglob("*.py")
        for name in private_attributes(ast.parse(path.read_text())) - fine
    }
    assert used == set()


DEEPSPEEDS = re.compile(r"(self\.|deepspeed_)?(engine|optimizer|zero|coordinator|bucket|checkpoint_engine)")
"""What objects of DeepSpeed are called in the adapter."""


def attributes_of_deepspeed(tree: ast.Module) -> set[str]:
    """Return what a module reads of DeepSpeed's objects, and sets in them with `put` or `in_place_of`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and DEEPSPEEDS.fullmatch(ast.unparse(node.value)):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("put", "in_place_of"):
            names |= {str(each.value) for each in node.args[1:2] if isinstance(each, ast.Constant)}
    return {re.sub(r"^_[A-Z]\w*?__", "__", name) for name in names}


OF_TORCHS_OPTIMIZER = {"param_groups", "state"}


def test_attributes_of_deepspeeds_objects_are_in_the_table() -> None:
    fine = known() | own_names() | OF_TORCHS_OPTIMIZER
    for file in ("stages.py", "checkpoint_files.py", "collectives.py"):
        assert attributes_of_deepspeed(ast.parse((ADAPTER / file).read_text())) <= fine


def test_such_attributes_are_seen() -> None:
    tree = ast.parse("optimizer._late_step(); getattr(engine, '_lost'); coordinator._Class__hidden; self._own")
    assert private_attributes(tree) == {"_late_step", "_lost", "__hidden"}
    tree = ast.parse("optimizer.late; put(engine, 'lost', 1); in_place_of(bucket, '_Class__hidden')(f); model.own")
    assert attributes_of_deepspeed(tree) == {"late", "lost", "__hidden"}


def test_as_a_program_it_prints_what_does_not_hold() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "frugal.deepspeed_adapter.contract"], capture_output=True, text=True, check=False
    )
    told = f"DeepSpeed {version('deepspeed')}; tested: 0.19.6, 0.19.7, 0.19.8\n0 names are missing\n"
    assert ran.returncode == 0 and told in ran.stdout


def test_a_private_name_is_not_called_public() -> None:
    used = [re.split(r"[.:]", each.path)[-1] for each in contract.PUBLIC]
    assert [name for name in used if name.startswith("_")] == []


def test_a_required_name_has_a_reason() -> None:
    assert all(each.why for each in TABLE)
    assert len({(each.module, each.path, each.why) for each in TABLE}) == len(TABLE)
