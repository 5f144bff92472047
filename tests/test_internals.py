"""Private names of torch and transformers stand in one module each, in a table that holds and is checked."""

import ast
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import frugal
from frugal import required, torch_internals
from frugal.config.schema import understand
from frugal.dryrun.planner import plans_here
from frugal.errors import RequestError
from frugal.models import transformers_internals
from frugal.required import Required, needed
from tests.test_structure import tree_of

PACKAGE = Path(frugal.__file__).parent
LIBRARIES = {
    "torch": (torch_internals, torch_internals.NAMES),
    "transformers": (transformers_internals, transformers_internals.NAMES),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_is_there(library: str) -> None:
    assert required.missing(LIBRARIES[library][1]) == ()


def test_every_name_is_there_after_torch_compile_which_replaces_some_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import mutation_guard

    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(torch.nn.Module, name, getattr(torch.nn.Module, name))
    monkeypatch.setattr(torch.nn.Module, "___needs_generation_tag_patch", True, raising=False)
    before = torch.nn.Module.__init__
    mutation_guard.install_generation_tagging_init()
    assert torch.nn.Module.__init__ is not before
    assert required.missing(torch_internals.NAMES) == ()


@pytest.mark.parametrize("library", ["torch", "deepspeed", "transformers"])
def test_pip_takes_every_tested_version_and_later_ones(library: str) -> None:
    tested, root = required.TESTED[library], PACKAGE.parent
    assert re.search(rf'"{library}>={re.escape(tested[0])},<\d"', (root / "pyproject.toml").read_text())
    pinned = re.search(rf"^{library}==(.*)$", (root / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and not required.untested({library: pinned[1]})
    in_table = (root / "docs" / "reference" / "versions.md").read_text()
    assert [each for each in tested if f"| {library} {each}" not in in_table] == []


def test_a_version_that_was_not_tested_is_named_in_one_line() -> None:
    tested = {"torch": "2.15.3+cu132", "deepspeed": "0.19.8", "transformers": "5.20.2"}
    assert required.untested(tested) == ()
    assert required.untested(tested | {"torch": "2.16.0"}) == (
        "torch 2.16.0 was not tested with frugal, as 2.13, 2.14, 2.15 were: names that frugal needs are checked, "
        "but memory may differ",
    )
    assert required.untested({"transformers": "5.2.0"}), "5.20 is another minor version"


def test_a_plan_with_a_version_that_was_not_tested_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(required.TESTED, "torch", ("1.0",))
    draft = next(plans_here(*understand({"gpus": 4, "mem": "12G"})))
    note = f"torch {version('torch')} was not tested with frugal"
    assert [each.startswith(note) for each in draft.warnings].count(True) == 1


def given(first: int, _second: int, third: int = 0, added: int = 0, **rest: int) -> None:
    """Stand for a function of another library."""


@pytest.mark.parametrize(
    ("form", "holds"),
    [
        ("(first, _second)", True),
        ("(first, _second, third)", True),  # what was added since has a default
        ("(first)", False),  # the second is needed, and we do not give it
        ("(first, second)", False),
        ("(first, _second, added)", False),
        ("(first, _second, third, added, rest, more)", False),
    ],
)
def test_a_function_holds_if_it_can_be_called_with_what_we_give(form: str, holds: bool) -> None:
    told = required.missing(needed(__name__, "a test", f"given{form}"))
    assert told == (() if holds else (f"{__name__}.given is (first, _second, third, added, rest), not {form}",))


def test_another_torch_is_refused_with_what_it_lacks() -> None:
    lacking = (*torch_internals.NAMES, *needed("torch", "a test", "_C._late", "Tensor._lost"))
    with pytest.raises(RequestError) as caught:
        required.verify("torch", lacking)
    assert caught.value.because == ("torch._C has no `_late`", "torch.Tensor has no `_lost`")
    assert str(caught.value).endswith("hint: pip install 'torch==2.15.*'")


def test_another_transformers_is_refused_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = needed("transformers.masking_utils", "a test", "sdpa_mask:skips_everything")
    monkeypatch.setattr(transformers_internals, "NAMES", lacking)
    with pytest.raises(RequestError, match="sdpa_mask does not name `skips_everything`"):
        transformers_internals.always_use()


def private(table: tuple[Required, ...]) -> set[str]:
    """Private parts of a table's paths, but for those that every class has."""
    parts = {part for each in table for part in re.split(r"[.:]", each.path)}
    return {part for part in parts if part.startswith("_") and not part.startswith("__")}


IN_PLACE = {"_buffers", "_parameters", "_should_skip_dynamo"}
"""Of torch; DeepSpeed has names like them, and the last is given by our own mode."""


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_other_module_uses_a_private_name(library: str) -> None:
    module, table = LIBRARIES[library]
    names = private(table) - IN_PLACE - {name for name in private(table) if hasattr(torch.ops.aten, name)}
    for path in sorted(PACKAGE.rglob("*.py")):
        if str(path) == module.__file__:
            continue
        for node in ast.walk(tree_of(path)):
            own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
            if isinstance(node, ast.Attribute) and not own:
                assert node.attr not in names, f"{path.name} uses {node.attr}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library:
                parts = {*str(node.module).split("."), *(each.name for each in node.names)}
                assert not [part for part in parts if part.startswith("_") or part in names], f"{path.name}"


def test_private_operators_are_in_the_table() -> None:
    known = {each.path for each in torch_internals.NAMES}
    used = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"\baten\._[a-z0-9_]+", path.read_text())
        if path.name != "torch_internals.py"
    }
    core = {name for name in used if _is_core(getattr(torch.ops.aten, name.removeprefix("aten.")))}
    assert core and used - core <= known
    assert not core & known, "documented"


def _is_core(packet: Any) -> bool:
    """Return whether an operator is in the Core ATen IR, which torch documents and keeps."""
    return any(torch.Tag.core in getattr(packet, name).tags for name in packet.overloads())
