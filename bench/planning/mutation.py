"""`python -m bench.planning.mutation [WORD ...]`: whether the tests of planning notice when its arithmetic is wrong.

Each mutant is one small change of the source that makes a number wrong. A run copies the package and its tests into a
temporary folder, applies one mutant at a time, and runs `tests/planning` and `tests/config`: claims about single
functions, without torch, without DeepSpeed and without the kept plans in `ds_configs/`. A mutant is killed if a test
fails. With words only the mutants run whose file or meaning has one of them, and nothing is kept.

Goal: no more than one mutant in eight survives.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.environment import environment
from bench.goals import report_goals

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "mutation.json"
TESTS = ("tests/planning", "tests/config")
LOADS_DEEPSPEED = "test_deepspeed_reads_the_same_hosts_and_slots_from_the_same_file"
PART_OF_GOAL = 1 / 8


@dataclass(frozen=True)
class Mutant:
    """In `file` of the package, `old` becomes `new`; `means` says what is then wrong."""

    file: str
    old: str
    new: str
    means: str


MUTANTS = (
    # seconds of a step
    Mutant(
        "planning/cost.py",
        "communication - 2 / 3 * compute",
        "communication - compute",
        "communication that overlaps hides behind all of the compute, not behind backward alone",
    ),
    Mutant(
        "planning/cost.py",
        "moved += 2 * num_steps * weights",
        "moved += num_steps * weights",
        "offloaded parameters come up once in a micro-step, not in forward and in backward",
    ),
    Mutant(
        "planning/cost.py",
        "NVME_BANDWIDTH = 2e9",
        "NVME_BANDWIDTH = 20e9",
        "a node's disk is ten times as fast as any",
    ),
    Mutant(
        "planning/cost.py",
        "disk = moved_on_disk * ranks_per_node / NVME_BANDWIDTH",
        "disk = moved_on_disk / NVME_BANDWIDTH",
        "the ranks of a node do not share its disk",
    ),
    Mutant(
        "planning/cost.py",
        "reductions = num_steps if strategy.zero_stage == 2 else 1",
        "reductions = 1",
        "ZeRO-2 reduces gradients once a step, not in each micro-step",
    ),
    Mutant(
        "planning/cost.py",
        "else min(cluster.intra_bandwidth, cluster.inter_bandwidth)",
        "else cluster.intra_bandwidth",
        "nodes are joined by links as fast as those inside them",
    ),
    Mutant(
        "planning/cost.py",
        "repeated = REPEATED_OPERATORS * work.num_recomputed",
        "repeated = 1.0 * work.num_recomputed",
        "a recomputed operator is launched as soon as any other",
    ),
    Mutant(
        "planning/cost.py",
        "model.facts.trainable_parameters / (cluster.world_size if strategy.zero_stage >= 1 else 1)",
        "model.facts.trainable_parameters / (cluster.world_size if strategy.zero_stage >= 2 else 1)",
        "under ZeRO-1 each rank updates all elements",
    ),
    # the batch
    Mutant(
        "planning/batch.py",
        "kinds = ((num_larger, per_step + 1), (num_steps - num_larger, per_step))",
        "kinds = ((num_larger, per_step), (num_steps - num_larger, per_step))",
        "what does not divide by the micro-steps is lost",
    ),
    Mutant(
        "planning/batch.py",
        "fewest = -(-global_batch // sum(caps))",
        "fewest = global_batch // sum(caps) + 1",
        "one accumulation step too many where the batch divides",
    ),
    Mutant(
        "planning/batch.py",
        "key=lambda group: -(samples * capacities[group] % total)",
        "key=lambda group: samples * capacities[group] % total",
        "a sample that is left goes to the ranks that are due least of it",
    ),
    # length bucketing
    Mutant(
        "planning/length_bucketing.py",
        "self.tokens[rank] // max(longest, self.shortest)",
        "self.tokens[rank] // longest",
        "a micro-batch of short samples has more of them than was proven",
    ),
    Mutant(
        "planning/length_bucketing.py",
        "return max(1, self.tokens[rank] // max(longest, self.shortest))",
        "return 1 + self.tokens[rank] // max(longest, self.shortest)",
        "a micro-batch is one sample over its budget",
    ),
    Mutant(
        "planning/length_bucketing.py",
        "-(-seq_len // SHORTEST_SHARE))",
        "1)",
        "samples of few tokens make micro-batches of any number",
    ),
    # strategies
    Mutant(
        "planning/strategy.py",
        '2 if request.precision != "fp32" else 0',
        '0 if request.precision != "fp32" else 0',
        "bf16 is trained under ZeRO-0, whose Adam starts at its second step",
    ),
    Mutant(
        "planning/strategy.py",
        '2 if request.precision != "fp32" else 0',
        '1 if request.precision != "fp32" else 0',
        "bf16 is trained under ZeRO-1, which loses gradients under fp32 accumulation",
    ),
    Mutant(
        "planning/strategy.py",
        '            + (self.offload_optimizer == "nvme")\n',
        "",
        "a disk is as simple as host memory",
    ),
    # memory
    Mutant(
        "planning/memory/profile.py",
        "            most = max(most, other, key=lambda memory: memory.total_bytes)",
        "            pass",
        "the memory is that of the rank with most live bytes, not of the one that needs most",
    ),
    Mutant(
        "planning/memory/profile.py",
        "if known >= micro_batch)",
        "if known > micro_batch)",
        "a micro-batch that was dry-run is given the memory of a larger one",
    ),
    Mutant(
        "planning/memory/profile.py",
        "slack = replays.smallest_capacity(device.usable_bytes) - peak.total_bytes",
        "slack = 0",
        "the allocator wastes nothing",
    ),
    Mutant(
        "planning/memory/breakdown.py",
        "a_rank += (states + 4) * model.trainable_parameters",
        "a_rank += states * model.trainable_parameters",
        "summed gradients take no room on a disk",
    ),
    # the search
    Mutant(
        "planning/search/candidate.py", "TIE = 1.02", "TIE = 1.0", "of equally fast strategies not the simplest wins"
    ),
    Mutant(
        "planning/search/candidate.py",
        '    ("off", "budget"),  # a mixture only where it was pinned\n'
        '    ("full", "selective"),\n    ("offloaded",),\n',
        '    ("offloaded",),\n    ("full", "selective"),\n    ("off", "budget"),\n',
        "strategies that recompute are traced before those that do not",
    ),
    Mutant("planning/search/candidate.py", "TRUST = 0.01", "TRUST = 0.1", "a profile may be 10 % off its dry run"),
    # what is said where nothing fits, and what would help
    Mutant(
        "planning/why.py",
        "needed = (nearest.memory.total_bytes + device.context_above_bytes) / (1 - share)",
        "needed = 1.2 * (nearest.memory.total_bytes + device.context_above_bytes) / (1 - share)",
        "more memory is asked for than would do",
    ),
    Mutant(
        "planning/why.py",
        "if flag.split()[0] in ",
        "if False and flag.split()[0] in ",
        "a large change is proposed beside a smaller one of the same kind",
    ),
    Mutant(
        "config/hardware/cluster.py",
        "margin_bytes=max(0, margin_bytes(memory_bytes, max(0, above), is_known_card=is_known_card) + extra)",
        "margin_bytes=device.margin_bytes",
        "a larger device keeps the margin of the smaller one",
    ),
    Mutant(
        "planning/what_if.py",
        "inter_bandwidth=2 * cluster.inter_bandwidth",
        "inter_bandwidth=cluster.inter_bandwidth",
        "links twice as fast are so only inside a node",
    ),
    # what is asked
    Mutant(
        "config/request.py",
        'ratio if rule == "linear" else sqrt(ratio)',
        'sqrt(ratio) if rule == "linear" else ratio',
        "the rules for the learning rate are exchanged",
    ),
    Mutant(
        "config/sample_lengths.py",
        "(2 * i + 1) * self.num_samples",
        "(2 * i + 2) * self.num_samples",
        "a typical batch is of longer samples than the data",
    ),
)


def applied(mutant: Mutant, source: str) -> str:
    """The source with the mutant in it.

    Raises:
        ValueError: what is to be replaced is not there exactly once; the mutant has to follow the code.
    """
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has `{mutant.old}` {source.count(mutant.old)} times")
    return source.replace(mutant.old, mutant.new)


def first_failure(folder: Path, first: str = "") -> str | None:
    """The first test that fails on the package in `folder`; those of the file `first` go first. None: all pass."""
    likely = [first] if (folder / first).is_file() else []
    options = ("-x", "-p", "no:cacheprovider", "-n", "0", "-k", f"not {LOADS_DEEPSPEED}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *likely, *TESTS],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split(" - ")[0].split(" ", 1)[1] if failed else "the tests could not be collected"


def copied(source: Path, folder: Path) -> Path:
    """A copy of the package, its tests and what these read, in `folder`."""
    for part in ("frugal", "tests", "bench", "ds_configs"):
        shutil.copytree(source / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "shipped_traces"))
    for part in ("pyproject.toml", "README.md"):
        shutil.copy(source / part, folder / part)
    return folder


def killer(mutant: Mutant, source: Path) -> str | None:
    """The test that notices the mutant in a copy of `source`; None: it survives."""
    with TemporaryDirectory() as name:
        folder = copied(source, Path(name))
        file = folder / "frugal" / mutant.file
        file.write_text(applied(mutant, file.read_text()))
        return first_failure(folder, f"tests/{mutant.file.split('/')[0]}/test_{file.name}")


def main(words: list[str]) -> int:
    """Run the mutants, two at a time, and say which survive."""
    mutants = [each for each in MUTANTS if not words or any(word in each.file + each.means for word in words)]
    rows = []
    with TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        source = copied(ROOT, Path(name))  # whoever edits meanwhile changes nothing
        if (failed := first_failure(source)) is not None:
            sys.stderr.write(f"error: without any mutant {failed} fails\n")
            return 2
        for mutant, test in zip(mutants, pool.map(partial(killer, source=source), mutants), strict=True):
            print(f"{'killed  ' if test else 'SURVIVED'} {mutant.file}: {mutant.means}", flush=True)
            rows.append({"file": mutant.file, "means": mutant.means, "killed_by": test})
    survived = sum(row["killed_by"] is None for row in rows)
    goals = {f"at most one mutant in eight survives ({survived} of {len(rows)})": survived <= PART_OF_GOAL * len(rows)}
    result = environment("python -m bench.planning.mutation") | {
        "tests": TESTS, "mutants": len(rows), "killed": len(rows) - survived, "goals": goals, "rows": rows,
    }  # fmt: skip
    return report_goals(result, None if words else RESULTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
