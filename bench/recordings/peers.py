"""`python -m bench.recordings.peers`: other estimators of memory on the rows of real cards that frugal is held to.

fitcheck-llm and torch-preflight are installed in an environment of their own in a temporary folder, beside the
accelerate and DeepSpeed that are installed here. Each is asked for every row of `bench/results/predictions.json`; what
it cannot express, it says (`bench.recordings.peers_asked`). An answer is compared with the bytes in segments
(`max_memory_reserved`), or in blocks where only these are known, without CUDA's context. frugal stands beside on the
same rows.

Results go to `bench/results/peers.json`, and the table to `docs/recordings.md`.
"""

import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.environment import environment
from bench.recordings.predicted import RESULTS as PREDICTIONS
from bench.recordings.questions import questions

RESULTS = PREDICTIONS.with_name("peers.json")
DOCS = Path(__file__).parents[2] / "docs" / "recordings.md"
INSTALLED = ("fitcheck-llm", "torch-preflight")
OWN = {"fitcheck-llm": "Anassbzdd/fitcheck", "torch-preflight": "highwaterlabs/torch-preflight"}
"""Repositories whose rows a peer was fitted to; they are left out of its own ranking."""

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"


def answers(asked: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Install the peers in a temporary folder and return what they answer, with their versions."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *INSTALLED], check=True)
        packages = Path(folder) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (packages / "installed_here.pth").write_text(sysconfig.get_path("purelib") + "\n")  # behind its own
        script = Path(__file__).with_name("peers_asked.py")
        found = subprocess.run([python, script], input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def known(row: dict[str, Any]) -> str:
    """Return what is known of a row, and compared."""
    return "allocated" if row["reserved_bytes"] is None else "reserved"


def ranked(rows: Sequence[dict[str, Any]], found: dict[str, int | str], own: str | None = None) -> dict[str, Any]:
    """Return the errors of one peer on the rows that it answers, and frugal's on the same. `own`: the repository of
    rows that it was fitted to."""
    fitted = {row["name"] for row in rows if own is not None and row["repository"] == own}
    reasons = Counter(answer for name, answer in found.items() if isinstance(answer, str) and name not in fitted)
    if fitted:
        reasons["what it was fitted to"] = len(fitted)
    rows = [row for row in rows if row["name"] not in fitted]
    found = {name: answer for name, answer in found.items() if name not in fitted}
    answered = [row for row in rows if isinstance(found.get(row["name"]), int)]
    if len(found) < len(rows):
        reasons["no decoder of equal layers"] = len(rows) - len(found)
    result: dict[str, Any] = {"rows": len(answered), "cannot_express": dict(reasons.most_common())}
    if answered:
        theirs = [int(found[row["name"]]) / row[f"{known(row)}_bytes"] - 1 for row in answered]
        ours = [row[f"{known(row)}_error"] for row in answered]
        for name, errors in (("error", theirs), ("frugal_error", ours)):
            sizes = [abs(error) for error in errors]
            result[name] = {
                "median": statistics.median(sizes), "worst": max(sizes), "lowest": min(errors), "highest": max(errors)
            }  # fmt: skip
    return result


def table(result: dict[str, Any]) -> list[str]:
    """Return the ranking as a table of Markdown, the most exact first."""
    lines = ["| estimator | rows it can express | median | worst | lowest, highest | frugal on these rows |"]
    lines.append("|---|---|---|---|---|---|")
    own = result["frugal"]
    lines.append(
        f"| frugal | {own['rows']} | {own['median']:.2%} | {own['worst']:.1%} | "
        f"{own['lowest']:+.1%}, {own['highest']:+.1%} | |"
    )
    for name, peer in sorted(result["peers"].items(), key=lambda each: each[1].get("error", {}).get("median", 9.0)):
        named = f"{name} {result['peer_versions'][name]}"
        if not peer["rows"]:
            lines.append(f"| {named} | 0 | | | | |")
            continue
        errors, beside = peer["error"], peer["frugal_error"]
        lines.append(
            f"| {named} | {peer['rows']} | {errors['median']:.1%} | {errors['worst']:.1%} | "
            f"{errors['lowest']:+.1%}, {errors['highest']:+.1%} | "
            f"median {beside['median']:.2%}, worst {beside['worst']:.1%} |"
        )
    return [line.replace("%", " %") for line in lines]


def write_table(lines: Sequence[str]) -> None:
    """Put the table between its marks in the documentation."""
    before, rest = DOCS.read_text().split(BEGIN)
    after = rest.split(END)[1]
    DOCS.write_text("\n".join([before + BEGIN, *lines, END + after]))


def main() -> None:
    """Ask all peers, print the table, and write it and the results."""
    rows = json.loads(PREDICTIONS.read_text())["rows"]
    asked = questions(rows)
    found = answers(asked)
    errors = [row[f"{known(row)}_error"] for row in rows]
    own = {
        "rows": len(rows), "median": statistics.median(map(abs, errors)), "worst": max(map(abs, errors)),
        "lowest": min(errors), "highest": max(errors),
    }  # fmt: skip
    result = {
        "frugal": own, "peer_versions": found["versions"],
        "peers": {name: ranked(rows, of_peer, OWN.get(name)) for name, of_peer in found["answers"].items()},
    }  # fmt: skip
    lines = table(result)
    print("\n".join(lines))
    for name, peer in result["peers"].items():
        for reason, number in peer["cannot_express"].items():
            print(f"{name}: {number} rows: {reason}")
    about = environment("python -m bench.recordings.peers")
    answered = {row["name"]: {peer: of[row["name"]] for peer, of in found["answers"].items() if row["name"] in of}
                for row in rows}  # fmt: skip
    RESULTS.write_text(json.dumps({**about, **result, "answers": answered}, indent=1) + "\n")
    write_table(lines)


if __name__ == "__main__":
    main()
