"""Kill processes at random and check that nothing is lost: `frugal train`, repeatedly, on changing ranks.

    python -m bench.reliability.kills [50] [--seed 0] [--minutes 60] [--add]

A tiny GPT-2 without dropout trains under ZeRO-2 with a checkpoint every `SAVE_EVERY` steps. SIGKILL goes to any rank
or to the command, while it starts, between two steps, or in a save. Then the run is resumed on another
number of CPU ranks; a part of the commands restart by themselves (`--max-restarts --elastic`). All is drawn by
`--seed`, but how far a run is at a moment depends on the machine. At the end:

- every step stands once, in order, in metrics.jsonl;
- the losses are, bit for bit, those of a run that nobody killed and that changed its ranks at the same steps;
- they are those of a run on two ranks as far as sums in another order allow;
- no process is left after a kill, and no temporary file at the end: each start removes those of killed ones.

The run goes on until there were as many kills as asked for; how many steps that takes depends on the machine.

Results go to `bench/results/kills-cpu.json`; a table of what was killed and when is printed.
"""

import argparse
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]  # has no types

from bench.environment import environment
from bench.goals import report_goals
from bench.plans import plan_by_hand
from bench.ranks import Ranks
from bench.reliability.soak import last_step
from bench.runs import command, prepared, records
from bench.runs import environment as environment_of_runs
from frugal.config.learning_rate import Schedule
from frugal.config.optimizers import Optimizer
from frugal.config.run_settings import RunSettings
from frugal.planning.plan import Plan

RESULTS = Path(__file__).parents[1] / "results" / "kills-cpu.json"
KILLS, SAVE_EVERY, LONGEST = 50, 4, 12
STEPS_OF_SCHEDULE = 200  # a kill: more than a run has, so that the learning rate is the same however many those are
START_SECONDS = 15.0
RANKS = {1: 2, 2: 2, 3: 1}
"""How often a run has so many ranks: three share the cores of a small machine."""

PATIENCE_SECONDS = 300
MARK = "FRUGAL_KILLS"
"""In the environment of every process of a run: its folder."""

TAME = {"learning_rate": 1e-3, "optimizer": Optimizer(epsilon=1e-3)}
"""So that a last bit in a sum stays one: AdamW divides by the root of a mean square, which is small now and then."""

CLOSE = 1e-5
WITHOUT_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # whose masks would depend on the ranks


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One SIGKILL.

    Attributes:
        ranks: of the run.
        moment: `start`, `step` or `save`.
        target: what was killed: `rank 1`, `command`.
        step: the newest that was logged then.
        first_step: that the command had begun with.
        gone_seconds: until no process of the run was left, or, where it restarts by itself, until it trained again.
        restarts: whether the command restarts by itself.
    """

    ranks: int
    moment: str
    target: str
    step: int
    first_step: int
    gone_seconds: float
    restarts: bool

    @property
    def is_restarted(self) -> bool:
        """True if the command went on after it."""
        return self.restarts and self.target != "command"


@dataclass(frozen=True)
class Spell:
    """From when to when, in Unix seconds, one command ran on so many ranks."""

    began: float
    ended: float
    ranks: int


class Run:
    """`frugal train` in `folder`, from where it stands to `steps` of a schedule `of` so many."""

    def __init__(self, folder: Path, out: str, ranks: int, steps: int, of: int, *more: object) -> None:
        self.folder, self.out, self.ranks = folder, folder / out, ranks
        self.first_step = last_step(self.out / "metrics.jsonl")
        has_checkpoint = (self.out / "checkpoints" / "latest").exists()
        self.process = subprocess.Popen(
            command(
                "--plan", f"plan{ranks}.json", "--data", "text.jsonl", "--steps", steps,
                "--set", f"schedule.steps={of}",
                "--save-every", SAVE_EVERY, "--eval-every", 0, "--out", out,
                *(["--resume"] if has_checkpoint else []), *more,
            ),
            cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment_of_runs(folder) | {MARK: str(folder), "TMPDIR": str(folder / "tmp")},
        )  # fmt: skip

    @property
    def is_over(self) -> bool:
        """True if the command has ended."""
        return self.process.poll() is not None

    def step(self) -> int:
        """The newest that was logged."""
        return last_step(self.out / "metrics.jsonl")

    def wait_until(self, is_so: Callable[[], bool]) -> bool:
        """Wait; False where the command has ended before.

        Raises:
            TimeoutError: nothing happens.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            if self.is_over:
                return False
            if time.monotonic() > end:
                raise TimeoutError(f"the run in {self.out} neither goes on nor ends")
            time.sleep(0.01)
        return True

    def targets(self) -> dict[str, psutil.Process]:
        """The processes that may be killed."""
        processes = {"command": psutil.Process(self.process.pid)}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                rank = next((word for word in child.cmdline() if word.startswith("--local_rank=")), None)
                if rank is not None:
                    processes[f"rank {rank.partition('=')[2]}"] = child
        return processes

    def end(self) -> tuple[int, str]:
        """Exit code and output."""
        output, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, output


def left(folder: Path) -> list[str]:
    """Processes of the runs in `folder`, in words."""
    lines = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                lines.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
    return lines


def at_a_moment(run: Run, draw: random.Random) -> str | None:
    """Wait until a moment that is drawn; None where the run has ended before."""
    moment = draw.choices(("start", "step", "save"), (2, 2, 1))[0]
    if moment == "start":
        end = time.monotonic() + draw.uniform(0.0, START_SECONDS)
        run.wait_until(lambda: time.monotonic() > end or run.step() > run.first_step)
        return None if run.is_over else "start" if run.step() == run.first_step else "step"
    goal = run.first_step + draw.randint(1, LONGEST)
    if moment == "step":
        is_there = run.wait_until(lambda: run.step() >= goal)
        time.sleep(draw.uniform(0.0, 0.1))
        return moment if is_there and not run.is_over else None
    checkpoints = run.out / "checkpoints"

    def saves() -> bool:
        return any(checkpoints.glob("*.tmp"))

    last = goal + 3 * SAVE_EVERY  # in case that no save is seen, which takes hundredths of a second
    is_there = run.wait_until(lambda: run.step() > run.first_step and (saves() or run.step() >= last))
    moment = "save" if saves() else "step"
    time.sleep(draw.uniform(0.0, 0.03))
    return moment if is_there else None


def killed(run: Run, draw: random.Random, restarts: bool) -> tuple[Kill | None, str]:
    """Kill something of the run, and wait for what becomes of it; the kill, if it came in time, and the output."""
    moment = at_a_moment(run, draw)
    kill = None
    if moment is not None:
        with suppress(psutil.Error):
            targets = run.targets()
            name = draw.choice(sorted(targets))
            step = run.step()
            targets[name].send_signal(signal.SIGKILL)
            began = time.monotonic()
            goes_on = restarts and name != "command"
            if goes_on:
                run.wait_until(lambda: run.step() > step)
            else:
                run.wait_until(lambda: False)
                _wait_until_gone(run.folder)
            kill = Kill(
                ranks=run.ranks, moment=moment, target=name, step=step, first_step=run.first_step,
                gone_seconds=round(time.monotonic() - began, 1), restarts=restarts,
            )  # fmt: skip
    if kill is not None and kill.is_restarted:
        run.wait_until(lambda: run.step() > kill.step + 2)
        with suppress(ProcessLookupError):
            run.process.send_signal(signal.SIGTERM)  # the next run has another number of ranks
    _, output = run.end()
    _wait_until_gone(run.folder)
    return kill, output


def _wait_until_gone(folder: Path) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while lines := left(folder):
        if time.monotonic() > end:
            raise TimeoutError("left after a kill:\n" + "\n".join(lines))
        time.sleep(0.05)


def disturbed(folder: Path, num_kills: int, seed: int, minutes: float) -> tuple[list[Kill], list[Spell]]:
    """Kill `num_kills` times, or for so many minutes, then let the run end: the kills, and on how many ranks it ran.

    Raises:
        RuntimeError: it does not end.
    """
    draw, kills, spells = random.Random(seed), list[Kill](), list[Spell]()
    of, ranks, end = STEPS_OF_SCHEDULE * num_kills, 0, time.monotonic() + 60 * minutes
    while len(kills) < num_kills and time.monotonic() < end:
        others = [number for number in RANKS if number != ranks]
        ranks = draw.choices(others, [RANKS[number] for number in others])[0]
        restarts = draw.random() < 0.25
        began = time.time()
        run = Run(folder, "killed", ranks, of, of, *(("--max-restarts", 3, "--elastic") if restarts else ()))
        kill, output = killed(run, draw, restarts)
        spells.append(Spell(began, time.time(), ranks))
        print(kill or f"ended by itself:\n{output}", file=sys.stderr, flush=True)
        kills += [] if kill is None else [kill]
    began = time.time()
    finished(Run(folder, "killed", 2, last_step(folder / "killed" / "metrics.jsonl") + LONGEST, of))
    return kills, [*spells, Spell(began, time.time(), 2)]


def finished(run: Run) -> None:
    """Wait for a run that nobody disturbs.

    Raises:
        RuntimeError: it failed.
    """
    code, output = run.end()
    if code != 0:
        raise RuntimeError(output)


def alike(folder: Path, spells: Sequence[Spell], of: int) -> list[tuple[int, float]]:
    """Losses of a run that changes its ranks where the killed one did, and ends there as it was asked to.

    It is made by processes that stay alive: one start of ranks for each number of them.
    """
    ranks_of, ranks = {}, {number: Ranks(number) for number in RANKS}
    for record in step_records(folder / "killed"):
        (ranks_of[record["step"]],) = [each.ranks for each in spells if each.began <= record["time"] <= each.ended]
    last = max(ranks_of)
    try:
        for step in sorted(ranks_of):
            if step == last or ranks_of[step + 1] != ranks_of[step]:
                ranks[ranks_of[step]].run(part, folder, step, of, timeout=PATIENCE_SECONDS)
    finally:
        for each in ranks.values():
            each.close()
    return losses(folder / "alike")


def part(folder: Path, step: int, of: int) -> None:
    """Train until `step` of a schedule `of` so many. Runs on ranks."""
    import torch

    from frugal.engine.training import train

    out = folder / "alike"
    train(
        Plan.read(folder / f"plan{torch.distributed.get_world_size()}.json"),
        RunSettings(
            data=(str(folder / "text.jsonl"),), steps=step, schedule=Schedule(steps=of), eval_every=0, out=out,
            resume=(out / "checkpoints" / "latest").exists(),
        ),
        torch.device("cpu"),
    )  # fmt: skip


def step_records(out: Path) -> list[dict[str, Any]]:
    """Return the records of steps in metrics.jsonl, in its order."""
    return [record for record in records(out) if record["event"] == "step"]


def losses(out: Path) -> list[tuple[int, float]]:
    """Step and loss, in the order of metrics.jsonl."""
    return [(record["step"], record["loss"]) for record in step_records(out)]


def largest_difference(ours: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]]) -> float:
    """Return the largest difference of losses at the same step, as a part of them."""
    return max(abs(mine / other - 1) for (_, mine), (_, other) in zip(ours, others, strict=True))


def stray(folder: Path) -> list[str]:
    """Temporary files that nobody will remove: in the run's folder and in that for temporary files.

    Not counted: the empty folder that torch makes for kernels that it may compile.
    """
    left_over = {*(folder / "killed").rglob("*.tmp*"), *(folder / "killed").rglob(".*"), *(folder / "tmp").iterdir()}
    return sorted(str(path.relative_to(folder)) for path in left_over if "torchinductor" not in path.name)


def plan(folder: Path, ranks: int) -> Plan:
    """Return a plan of the tiny model on so many CPU ranks."""
    made = plan_by_hand(
        world_size=ranks, global_batch=8, micro_batch=2, zero_stage=2,
        request={"model": str(folder / "config.json"), **TAME},
    )  # fmt: skip
    return msgspec.convert(msgspec.to_builtins(made), Plan).sealed()  # numbers as a file has them


def proof(num_kills: int, seed: int, minutes: float) -> dict[str, Any]:
    """Kill, compare, look for what is left."""
    with tempfile.TemporaryDirectory() as place:
        folder = prepared(Path(place), **WITHOUT_DROPOUT)
        for ranks in RANKS:
            (folder / f"plan{ranks}.json").write_bytes(plan(folder, ranks).to_json())
        (folder / "tmp").mkdir()
        began = time.monotonic()
        kills, spells = disturbed(folder, num_kills, seed, minutes)
        seconds = time.monotonic() - began
        temporary = stray(folder)
        whole, of = losses(folder / "killed"), STEPS_OF_SCHEDULE * num_kills
        steps = whole[-1][0]
        same_ranks = alike(folder, spells, of)
        finished(Run(folder, "whole", 2, steps, of))
        largest = largest_difference(whole, losses(folder / "whole"))
        return {
            "seed": seed, "steps": steps, "seconds": round(seconds),
            "kills": [asdict(each) for each in kills],
            "ranks_were_changed": sum(a.ranks != b.ranks for a, b in itertools.pairwise(spells)),
            "largest_difference_to_two_ranks": largest,
            "temporary_files": temporary,
            "goals": {
                "as many kills as asked for": len(kills) == num_kills,
                "every step once": [step for step, _ in whole] == list(range(1, steps + 1)),
                "losses bit for bit those of a run that nobody killed": whole == same_ranks,
                "no process is left after a minute": all(
                    each.gone_seconds < 60 for each in kills if not each.is_restarted
                ),
                f"losses those on two ranks to {CLOSE:g}": largest < CLOSE,
                "no temporary file is left": not temporary,
            },
        }  # fmt: skip


def table(kills: Sequence[Kill]) -> str:
    """By what was killed and when."""
    lines = [
        "| SIGKILL of | while it starts | between two steps | in a save | over after, median and longest |",
        "|---|---|---|---|---|",
    ]
    kinds = {"a rank": "rank", "the command": "command"}
    for words, kind in kinds.items():
        mine = [each for each in kills if each.target.startswith(kind)]
        number = Counter(each.moment for each in mine)
        ends = [each.gone_seconds for each in mine if not each.is_restarted]
        over = f"{statistics.median(ends):.1f} s, {max(ends):.1f} s" if ends else ""
        lines.append(f"| {words} | {number['start']} | {number['step']} | {number['save']} | {over} |")
    return "\n".join(lines)


def summary(runs: Sequence[dict[str, Any]]) -> str:
    """In a sentence."""
    number = {what: sum(count(each) for each in runs) for what, count in _COUNTS.items()}
    largest = max(each["largest_difference_to_two_ranks"] for each in runs)
    return (
        f"{number['kills']} kills and {number['changes']} changes of the number of ranks in {number['steps']} steps; "
        f"losses differ from those on two ranks by at most {largest:.0e}"
    )


_COUNTS: dict[str, Callable[[dict[str, Any]], int]] = {
    "kills": lambda run: len(run["kills"]),
    "changes": lambda run: run["ranks_were_changed"],
    "steps": lambda run: run["steps"],
}


def main() -> int:
    """Kill, compare, and keep what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=KILLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="begin no other kill after so many")
    parser.add_argument("--add", action="store_true", help="to what is kept, instead of replacing it")
    asked = parser.parse_args()
    run = proof(asked.kills, asked.seed, asked.minutes)
    print(*run["temporary_files"], sep="\n", file=sys.stderr)
    runs = [*(json.loads(RESULTS.read_text())["runs"] if asked.add else ()), run]
    result = environment("python -m bench.reliability.kills " + " ".join(sys.argv[1:])) | {
        "save_every": SAVE_EVERY,
        "runs": runs,
        "goals": {goal: all(each["goals"][goal] for each in runs) for goal in run["goals"]},
    }
    print(table([Kill(**kill) for each in runs for kill in each["kills"]]), summary(runs), sep="\n\n")
    return report_goals(result, RESULTS)


if __name__ == "__main__":
    sys.exit(main())
