"""`python -m bench.check.shell --folder FOLDER`: long commands of public shell scripts, as tree-sitter-bash finds them
and as `frugal.tools.check.shell` reads them.

Of each command with five flags or more in tree-sitter's tree, the names of the flags must be, in their order, among
those of one command of ours, which expands variables and so may have more. The scripts are those in the list of
`bench.check.public`; what is missing in FOLDER is fetched. Needs `pip install tree-sitter tree-sitter-bash`, which
frugal does not use. Results go to `bench/results/check-shell.json`.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.check.public import Listed, fetched
from bench.environment import environment
from frugal.tools.check import shell

RESULTS = Path(__file__).parents[1] / "results" / "check-shell.json"
SCRIPTS = (".sh", ".slurm", ".sbatch")
MANY_FLAGS = 5


def main() -> None:
    """Compare, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    folder, listed = parser.parse_args().folder, Listed.kept()
    commands = found = 0
    missed: dict[str, list[list[str]]] = {}
    scripts = [
        (name, path) for name, each in listed.repositories.items() for path in each.files if path.endswith(SCRIPTS)
    ]
    for name, path in scripts:
        fetched(folder, name, listed.repositories[name], [path])
        text = (folder / name / path).read_text(errors="replace")
        ours = [_flags(words) for words in shell.commands(text, {})]
        for theirs in _long_commands(text):
            commands += 1
            if any(_is_within(theirs, each) for each in ours):
                found += 1
            else:
                missed.setdefault(f"{name}/{path}", []).append(theirs)
    result = {"scripts": len(scripts), "long_commands": commands, "found": found, "missed": missed}
    print(json.dumps(result, indent=1))
    about = environment("python -m bench.check.shell --folder FOLDER")
    about["tree-sitter-bash"] = version("tree-sitter-bash")
    RESULTS.write_text(json.dumps({**about, **result}, indent=1) + "\n")


def _long_commands(text: str) -> Iterator[list[str]]:
    """Yield the flags of each long command in tree-sitter's tree."""
    import tree_sitter_bash  # type: ignore[import-not-found, unused-ignore]  # see above
    from tree_sitter import Language, Parser  # type: ignore[import-not-found, unused-ignore]

    nodes: list[Any] = [Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node]
    while nodes:
        node = nodes.pop()
        nodes += node.children
        flags = _flags([each.text.decode() for each in node.children]) if node.type == "command" else []
        if len(flags) >= MANY_FLAGS:
            yield flags


def _flags(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--[\w-]", word)]


def _is_within(flags: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether `flags` are among `others`, in this order."""
    remaining = iter(others)
    return all(flag in remaining for flag in flags)


if __name__ == "__main__":
    main()
