"""What the documentation names exists: links and anchors, commands and flags, files, modules, Python examples."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
import unicodedata
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import click
import pytest

from frugal.cli import COMMANDS, cli
from frugal.planning.plan import SCHEMA, Plan
from tests import readme

ROOT, DOCS = readme.ROOT, readme.ROOT / "docs"
FOLDERS = ("frugal", "bench", "docs", "ds_configs", "launch", "tests")
each_page = pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def hooks() -> ModuleType:
    """docs/hooks.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def whole(page: Path) -> str:
    """A page with what is made from the code."""
    return hooks().on_page_markdown(page.read_text())


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """Without fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return what MkDocs makes of the headings."""
    names: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(whole(page)), flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)
        plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        names.append(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    assert len(names) == len(set(names)), f"two headings of {page.name} have one anchor"
    return set(names)


@each_page
def test_links_and_anchors_resolve(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(whole(page))):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if DOCS in page.parents and path:
            assert DOCS in target.parents, f"{link} leaves the site"
        assert not anchor or anchor in anchors(target), link


def commands(page: Path) -> list[str]:
    """`frugal ...` in console blocks, without comments."""
    lines = "".join(blocks(page, "console")).splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ frugal ")]


def parsers() -> dict[str, click.Command]:
    """The commands of frugal by their names."""
    found = {name: cli.get_command(click.Context(cli), name) for name in COMMANDS}
    return {name: command for name, command in found.items() if command is not None}


@each_page
def test_every_command_shown_parses(page: Path) -> None:
    for line in commands(page):
        _, name, *arguments = shlex.split(line, comments=True)
        parsers()[name].make_context(name, arguments)  # raises on an unknown flag or a wrong value


@each_page
def test_every_flag_named_exists(page: Path) -> None:
    options = [option for command in parsers().values() for option in command.params]
    known = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    known |= {"--help", "--help-all", "--version"}
    for span in re.findall(r"`(frugal [^`\n]*|--[^`\n]*)`", prose(page.read_text())):
        if not span.startswith("frugal-"):
            words = re.split(r"[\s|=]+", span)
            assert words[0] != "frugal" or not words[1].islower() or words[1] in COMMANDS, span
            assert {word for word in words if re.fullmatch(r"--[a-z][a-z0-9-]*", word)} - known <= FOREIGN, span


FOREIGN = {
    "--nproc-per-node",  # torchrun's
    "--token_batch_size", "--max_tokens_per_device", "--gradient_aggregation_steps",  # Nematus'
    "--strict",  # MkDocs'
    "--record",  # also of benchmarks
}  # fmt: skip


@each_page
def test_make_targets_benchmarks_files_and_modules_exist(page: Path) -> None:
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:\$ |`)make ([\w-]+)", text):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target}"
    for name in re.findall(r"python -m ((?:bench|tests)(?:\.\w+)+)", text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name
    for path in re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*[\w/])(?![\w*])", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"(?:`|::: |from |import )(frugal(?:\.(?!toml)\w+)+)", text):
        owner, _, attribute = name.rpartition(".")
        is_file = (ROOT / name.replace(".", "/")).exists() or (ROOT / f"{name.replace('.', '/')}.py").exists()
        assert is_file or hasattr(import_module(owner), attribute), name


@each_page
def test_python_examples_compile_and_import_what_there_is(page: Path) -> None:
    for example in blocks(page, "python"):
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("frugal"):
                module = import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "frugal":
                assert hasattr(import_module("frugal"), node.attr), ast.unparse(node)


def test_the_example_of_an_own_model_runs_and_is_short(tmp_path: Path) -> None:
    example = blocks(DOCS / "tutorials" / "own-model.md", "python")[1]
    assert len([line for line in example.splitlines() if line.strip()]) <= 25
    (tmp_path / "classify.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "classify.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    loss, evaluated = map(float, re.findall(r"(\d\.\d\d) on", done.stdout))
    assert loss < 1.0 and evaluated < 1.0, "four classes at random are 1.39"
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step-000060"


def test_the_navigation_has_every_page_once() -> None:
    listed = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_reference_has_every_flag_every_field_and_every_exit_code() -> None:
    flags = whole(DOCS / "reference" / "flags.md")
    for name, command in parsers().items():
        assert f"## frugal {name}\n" in flags
        assert all(option.opts[-1] in flags for option in command.params if isinstance(option, click.Option))
    fields = whole(DOCS / "reference" / "plan-json.md")
    assert f"Its `schema` is {SCHEMA}." in fields
    assert all(f"| `{name}` |" in fields for name in Plan.__dataclass_fields__)
    codes = whole(DOCS / "reference" / "exit-codes.md")
    assert re.findall(r"^\| (\d) \|", codes, flags=re.MULTILINE) == ["2", "3", "4", "5", "6", "7"]


def test_the_site_builds(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: it is no part of `dev`, `make docs` installs it")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "flags" / "index.html").exists()


@pytest.mark.parametrize("way", ["the way of a plan", "the way of a training step"])
def test_a_way_through_the_code_takes_five_to_eight_files(way: str) -> None:
    listed = (DOCS / "architecture.md").read_text().partition(f"<!-- {way} -->\n")[2].partition("\n\n")[0]
    files = re.findall(r"^\d+\. `([\w/]+\.py)`", listed, flags=re.MULTILINE)
    assert 5 <= len(files) <= 8
    assert all((ROOT / file).is_file() for file in files)
