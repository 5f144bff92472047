"""Private names of torch and transformers stand in one module each, in a table that holds and is checked."""

import ast
import re
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch

import frugal
from frugal import required, torch_internals
from frugal.errors import RequestError
from frugal.models import transformers_internals
from frugal.required import Required, needed

PACKAGE = Path(frugal.__file__).parent
TRANSFORMERS = (*transformers_internals.MASKS, *transformers_internals.LAYERS, *transformers_internals.MODELS)
LIBRARIES = {"torch": (torch_internals, torch_internals.NAMES), "transformers": (transformers_internals, TRANSFORMERS)}


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


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_tested_version_is_installed_and_the_only_minor_one_that_pip_takes(library: str) -> None:
    module: ModuleType = LIBRARIES[library][0]
    major, minor, _ = map(int, module.TESTED.split("."))
    assert version(library).partition("+")[0] == module.TESTED
    assert f"{library}=={module.TESTED}\n" in (PACKAGE.parent / "constraints.txt").read_text()
    assert f'"{library}>={major}.{minor},<{major}.{minor + 1}"' in (PACKAGE.parent / "pyproject.toml").read_text()


def test_another_torch_is_refused_with_what_it_lacks() -> None:
    lacking = (*torch_internals.NAMES, *needed("torch", "a test", "_C._late", "Tensor._lost"))
    with pytest.raises(RequestError) as caught:
        required.verify("torch", torch_internals.TESTED, lacking)
    assert caught.value.because == ("torch._C has no `_late`", "torch.Tensor has no `_lost`")
    assert str(caught.value).endswith("hint: pip install torch==2.13.0")


def test_another_transformers_is_refused_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = needed("transformers.masking_utils", "a test", "sdpa_mask:skips_everything")
    monkeypatch.setattr(transformers_internals, "MASKS", lacking)
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
        for node in ast.walk(ast.parse(path.read_text())):
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
    assert used and used <= known
