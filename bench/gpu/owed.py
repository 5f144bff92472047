"""`python -m bench.gpu.owed --minutes 25`: everything that has never run on a real GPU, in the order of its worth.

To be run first wherever there is a GPU for a while. Each check has a limit of its own; what there is no time for is
named. Results are written after each check, so that a run that is ended from outside leaves what it has. A check that
fails does not end the others. With `--emulated t4` it runs on an emulated card (docs/emulated-gpu.md), where memory is
torch's own, and values and times mean nothing.

    python -m bench.gpu.owed --minutes 25
    python -m bench.gpu.owed --only offload --only measure        (checks whose names have one of these words)
    python -m bench.gpu.owed --processes 5        (so many beside each other: times mean less)

1. `truth`: the table of `bench.gpu.truth`.
2. `context`, `calibrate`, `measure`: memory beyond tensors, part by part; a plan, measured free and capped at its
   promise, with the figure that nvidia-smi shows.
3. `allocator`: random requests through torch's allocator and through the replay, plain and with expandable segments.
4. `attention`, `reductions`, `requests`, `products`, `numerics`: which kernels this card takes, what they ask for,
   how far fused ones are from fp64.
5. `train: ...`: runs of `frugal train` in every way that one GPU allows: promised and measured bytes, recoveries,
   predicted and measured tokens per second.
6. `same: ...`: two runs that must have the same losses: other micro-batches; interrupted, and resumed, also under
   another ZeRO stage; killed, and restarted; short of memory, in plain and in expandable segments.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import psutil

from bench.emulated_gpu import environment as emulated
from bench.gpu.truth import RESULTS, environment
from frugal.planning.plan import Plan

STEPS = 8
PLANNED = ("--model", "gpt2", "--gpus", "1", "--seq-len", "512", "--global-batch", "32")
LORA = ("--lora", "r=16")
PRETRAINED = "from transformers import GPT2Config as C, GPT2LMHeadModel as M; M(C()).save_pretrained(r'{}')"
"""Makes the weights that adapters are put around: frugal refuses to freeze random ones."""
PLAIN_SEGMENTS = "PYTORCH_ALLOC_CONF=expandable_segments:False"  # in the environment, not a flag
TRAINED: dict[str, tuple[str, ...]] = {
    "as planned": (),
    "plain segments": (PLAIN_SEGMENTS,),
    "optimizer on the host": ("--offload", "optimizer"),
    "parameters on the host": ("--offload", "all", "--zero-stage", "3"),
    "activations on the host": ("--activation-checkpointing", "offloaded"),
    "layers recomputed": ("--activation-checkpointing", "full"),
    "parts recomputed": ("--activation-checkpointing", "selective"),
    "8-bit states": ("--optimizer", "adamw-8bit"),
    "bf16 states": ("--optimizer", "adamw,states=bf16"),
    "fp16, scaled losses": ("--precision", "fp16"),
    "fp32": ("--precision", "fp32"),
    "packed": ("--pack",),
    "whole logits": ("--loss", "plain"),
    "LoRA": LORA,
    "QLoRA": (*LORA, "--quantize", "nf4"),
}
"""Flags of a plan, by what is tried. gpt2 is small: what a way costs beside it shows."""

TRAINED_WITH: dict[str, tuple[str, ...]] = {"saved in the background": ("--set", "train.async-save=true")}
"""Flags of `frugal train`, with the plan that is made without flags."""

SHORT_OF = 0.3
"""A share of what a plan needs without the context, which a run then lacks."""

SAME: dict[str, tuple[str, ...]] = {
    "micro-batch of 1": ("--micro-batch", "1"),
    "micro-batch of 8": ("--micro-batch", "8"),
}


@dataclass(frozen=True)
class Check:
    """One check: its name, the most minutes it may take, and what runs it in a folder and returns its facts.

    `alone`: it measures the whole device, and runs before those that run beside each other.
    """

    name: str
    minutes: float
    run: Callable[["Runner", Path], dict[str, Any]]
    alone: bool = False


@dataclass
class Runner:
    """Starts commands of this project on the GPU, each of which ends at the deadline of its check.

    `precision`: of plans that ask for none. `memory_bytes`: of the GPU.
    """

    python: str
    environment: Mapping[str, str]
    deadline: float = 0.0
    precision: str = "bf16"
    memory_bytes: int = 0

    def __call__(
        self,
        *words: object,
        until: Callable[[], bool] | None = None,
        then: Callable[[psutil.Process], None] = lambda process: process.send_signal(signal.SIGINT),
    ) -> tuple[int, str]:
        """Run `python -m WORDS`; return its exit code and output. `until`: when `then` is done to it; Ctrl-C if not
        said.

        Raises:
            TimeoutError: it was not done at the deadline, and was ended with all that it had started.
        """
        with TemporaryDirectory() as folder, (Path(folder) / "output").open("w+") as output:
            process = subprocess.Popen(
                [self.python, "-m", *map(str, words)], stdout=output, stderr=subprocess.STDOUT,
                env=dict(self.environment), start_new_session=True,
            )  # fmt: skip
            while process.poll() is None:
                if time.monotonic() > self.deadline:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    output.seek(0)
                    raise TimeoutError(f"not done in time; its last words: {output.read()[-500:]}")
                if until is not None and until():
                    then(psutil.Process(process.pid))
                    until = None
                time.sleep(0.2)
            output.seek(0)
            return process.returncode, output.read()


def main() -> int:
    """Run the checks; 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.owed", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25.0, help="when to be done  [default: 25]")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="checks whose names have this word")
    parser.add_argument("--emulated", metavar="CARD", help="run on an emulated card, such as t4")
    parser.add_argument("--processes", type=int, default=1, help="checks beside each other  [default: 1]")
    parser.add_argument("--out", type=Path, help="[default: bench/results/gpu-owed-DEVICE.json]")
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes
    python, given = sys.executable, dict(os.environ)
    if asked.emulated:
        python, given = emulated.python(), emulated.environment(asked.emulated)
    runner = Runner(python, given | {"HF_HUB_OFFLINE": "1"}, end)
    device, capability, runner.memory_bytes = _device(runner)
    runner.precision = "bf16" if capability >= 8 else "fp16"
    out = asked.out or RESULTS / f"gpu-owed-{device.lower().replace(' ', '-')}.json"
    chosen = [each for each in checks(out.with_suffix("")) if _is_asked_for(each, asked.only)]
    rows: dict[str, Any] = {}
    for alone in (True, False):
        with ThreadPoolExecutor(1 if alone else asked.processes) as pool:
            results = {pool.submit(_checked, each, runner, end): each for each in chosen if each.alone == alone}
            for result in as_completed(results):
                name = results[result].name
                rows[name] = result.result()
                print(f"{name:32} {msgspec.json.encode(rows[name]).decode()[:300]}", flush=True)
                head = environment(device, "cuda", "bench.gpu.owed") | {"processes": asked.processes}
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_bytes(msgspec.json.format(msgspec.json.encode(head | {"checks": rows})) + b"\n")
    print(f"\nwrote {out}")
    return int(any("failure" in row for row in rows.values()))


def _is_asked_for(check: Check, words: list[str]) -> bool:
    return not words or any(word in check.name for word in words)


def _checked(check: Check, runner: Runner, end: float) -> dict[str, Any]:
    """The facts of a check; or why it failed, or was not run."""
    begun = time.monotonic()
    if begun >= end:
        return {"not_run": "no time was left"}
    runner = replace(runner, deadline=min(end, begun + 60 * check.minutes))
    with TemporaryDirectory(prefix="gpu-owed-") as folder:
        try:
            facts = check.run(runner, Path(folder))
        except Exception as error:  # the next checks are to run whatever became of this one
            facts = {"failure": f"{type(error).__name__}: {error}"[-1500:]}
    return facts | {"seconds": round(time.monotonic() - begun, 1)}


def checks(folder: Path) -> Iterator[Check]:
    """Yield the checks in order of worth; `folder` keeps the files that some of them write."""
    folder.mkdir(parents=True, exist_ok=True)
    yield Check(
        "truth", 9.5, lambda run, _: _output(run("bench.gpu.truth", "--minutes", 9, "--out", folder / "truth.json")),
        alone=True,
    )  # fmt: skip
    yield Check("context", 1, lambda run, _: _output(run("bench.gpu.context", folder / "context.json")), alone=True)
    yield Check("measure", 4, _measured, alone=True)
    for name, flags in TRAINED.items():
        yield Check(f"train: {name}", 4, lambda run, here, flags=flags: _trained(run, here, flags))
    for name, of_run in TRAINED_WITH.items():
        yield Check(f"train: {name}", 4, lambda run, here, of_run=of_run: _trained(run, here, (), of_run))
    yield Check("same: other micro-batches", 5, _same_micro_batches)
    yield Check("same: interrupted and resumed", 5, _same_resumed)
    yield Check("same: resumed under ZeRO-3", 5, lambda run, here: _same_resumed(run, here, "--zero-stage", "3"))
    yield Check("same: killed and restarted", 5, _same_restarted)
    for segments in ("plain", "expandable"):
        yield Check(f"same: short of memory, {segments}", 5, lambda run, here, s=segments: _same_short(run, here, s))
    for segments in ("plain", "expandable"):
        yield Check(f"allocator, {segments} segments", 2, lambda run, _, s=segments: _allocator(run, s))
    for name in ("attention", "reductions", "requests", "products"):
        file = folder / f"{name}.json.xz"
        yield Check(name, 2, lambda run, _, name=name, file=file: _output(run(f"bench.kernels.{name}", file)))
    yield Check("numerics", 2, lambda run, _: _output(run("bench.kernels.numerics")))
    yield Check(
        "calibrate", 3, lambda run, _: _answer(_ended(run("frugal", "measure", "--calibrate", "--json"))), alone=True
    )


def _device(runner: Runner) -> tuple[str, int, int]:
    """The GPU's name, its compute capability's first number, since bf16 needs 8, and its bytes."""
    code = (
        "import torch; at = torch.cuda.get_device_properties(0); print(at.name, at.major, at.total_memory, sep='\\n')"
    )
    done = subprocess.run([runner.python, "-c", code], env=dict(runner.environment), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: no GPU\n  because {done.stderr.strip().splitlines()[-1]}")
    name, major, total = done.stdout.strip().splitlines()[-3:]
    return name, int(major), int(total)


def _ended(done: tuple[int, str], codes: tuple[int, ...] = (0,)) -> str:
    """The output of a command that ended with one of `codes`.

    Raises:
        RuntimeError: it did not.
    """
    code, output = done
    if code not in codes:
        raise RuntimeError(f"exit code {code}: {output[-1200:]}")
    return output


def _output(done: tuple[int, str]) -> dict[str, Any]:
    """The last lines of a command that ended well."""
    return {"output": _ended(done).splitlines()[-30:]}


def _answer(output: str) -> Any:
    """The JSON in a command's output, among its notes."""
    return msgspec.json.decode(output[output.index("{") : output.rindex("}") + 1])


def _with_segments(run: Runner, segments: str, *settings: str) -> Runner:
    """The same with these segments and other settings of torch's allocator."""
    said = ",".join((f"expandable_segments:{segments == 'expandable'}", *settings))
    return replace(run, environment={**run.environment, "PYTORCH_ALLOC_CONF": said})


def _allocator(run: Runner, segments: str) -> dict[str, Any]:
    return _output(_with_segments(run, segments)("bench.gpu.allocator"))


def _planned(run: Runner, folder: Path, *flags: str) -> Plan:
    folder.mkdir(exist_ok=True)
    setting = dict(flag.split("=", 1) for flag in flags if flag == PLAIN_SEGMENTS)
    planner = Runner(run.python, {**run.environment, **setting}, run.deadline)
    asked = [*PLANNED, "--precision", run.precision, *(flag for flag in flags if flag != PLAIN_SEGMENTS)]
    if LORA[0] in flags:
        subprocess.run([run.python, "-c", PRETRAINED.format(folder / "model")], env=dict(run.environment), check=True)
        asked += ["--model", str(folder / "model")]
    _ended(planner("frugal", "plan", *asked, "-o", folder))
    return Plan.read(folder / "plan.json")


def _measured(run: Runner, folder: Path) -> dict[str, Any]:
    """A plan measured free and capped; memory may end at the cap, which is a fact and no failure."""
    plan = _planned(run, folder)
    found = _answer(_ended(run("frugal", "measure", folder / "plan.json", "--capped", "--json"), (0, 5)))
    promised = {"needed": plan.memory.total_bytes, "reserved_with_room": plan.memory.reserved_bytes}
    return {"promised_bytes": promised, "context_bytes_assumed": plan.memory.context, "measured": found}


def _train(run: Runner, folder: Path, out: str, *flags: object, **options: Any) -> list[dict[str, Any]]:
    """The records of steps of a run of `folder`'s plan, with what it said in `output` of the first."""
    words = ["train", "--plan", folder / "plan.json", "--data", "stdlib", "--steps", STEPS]
    words += ["--eval-every", STEPS // 2, "--save-every", STEPS // 2, "--out", folder / out, *flags]
    code, output = run("frugal", *words, **options)
    if not options:
        _ended((code, output))
    lines = (folder / out / "metrics.jsonl").read_bytes().splitlines()
    records = [msgspec.json.decode(line) for line in lines]
    steps = [record for record in records if record["event"] == "step"]
    return [{**steps[0], "output": output}, *steps[1:]]


def _trained(run: Runner, folder: Path, flags: tuple[str, ...], of_run: tuple[str, ...] = ()) -> dict[str, Any]:
    """A run beside its plan. The peak is of steps, an evaluation and a save."""
    plan = _planned(run, folder, *flags)
    tokenizer = ("--tokenizer", "byte") if LORA[0] in flags else ()  # random weights know no tokens
    steps = _train(run, folder, "run", *tokenizer, *of_run)
    later = steps[STEPS // 2 :] or steps
    positions = plan.batch.global_batch * plan.request.seq_len
    return {
        "strategy": str(plan.strategy),
        "micro_batch": plan.batch.largest_micro_batch,
        "planned_bytes": {"total": plan.memory.total_bytes, "live": plan.memory.live_bytes},
        "allocated_bytes": max(step["memory_bytes"] or 0 for step in steps),
        "reserved_bytes": max(step["reserved_bytes"] or 0 for step in steps),
        "recoveries": steps[0]["output"].count("out of memory"),
        "predicted_positions_per_second": round(positions / plan.time.total_seconds),
        "target_tokens_per_second": round(sum(step["tokens_per_second"] for step in later) / len(later)),
        "losses": [round(step["loss"], 5) for step in steps],
    }


def _same_micro_batches(run: Runner, folder: Path) -> dict[str, Any]:
    losses = []
    for i, flags in enumerate(SAME.values()):
        _planned(run, folder / str(i), *flags, "--precision", "fp32")
        losses.append([step["loss"] for step in _train(run, folder / str(i), "run")])
    return _compared(*losses)


def _same_resumed(run: Runner, folder: Path, *then: str) -> dict[str, Any]:
    """A run beside one that is interrupted once its first checkpoint is there, and resumed, with `then` in its plan."""
    _planned(run, folder)
    whole = _train(run, folder, "whole")
    _train(run, folder, "broken", until=_is_saved(folder / "broken"))
    _planned(run, folder, *then)
    resumed = _train(run, folder, "broken", "--resume")
    return _compared([step["loss"] for step in whole], [step["loss"] for step in resumed])


def _same_restarted(run: Runner, folder: Path) -> dict[str, Any]:
    """A run beside one whose rank is killed once its first checkpoint is there, and the memory before and after."""
    _planned(run, folder)
    whole = _train(run, folder, "whole")
    killed = _train(run, folder, "killed", "--max-restarts", 1, until=_is_saved(folder / "killed"), then=_kill_ranks)
    reserved = [step["reserved_bytes"] for step in killed]
    facts = {"reserved_bytes": reserved, "restarts": killed[0]["output"].count("restart 1 of 1")}
    return facts | _compared([step["loss"] for step in whole], [step["loss"] for step in killed])


def _same_short(run: Runner, folder: Path, segments: str) -> dict[str, Any]:
    """A run beside one for which torch's allocator may not have all that its plan needs, which has to recover."""
    plain = _with_segments(run, segments)
    memory = _planned(plain, folder, *([PLAIN_SEGMENTS] if segments == "plain" else [])).memory
    whole = _train(plain, folder, "whole")
    cap_bytes = round((1 - SHORT_OF) * (memory.total_bytes - memory.context))
    share = f"per_process_memory_fraction:{cap_bytes / run.memory_bytes:.6f}"
    short = _train(_with_segments(run, segments, share), folder, "short")
    recoveries = short[0]["output"].count("out of memory")
    if not recoveries:
        raise RuntimeError(f"{cap_bytes} bytes were enough: {short[0]['output'][-800:]}")
    facts = {"cap_bytes": cap_bytes, "recoveries": recoveries, "output": short[0]["output"].splitlines()[-12:]}
    return facts | _compared([step["loss"] for step in whole], [step["loss"] for step in short])


def _is_saved(out: Path) -> Callable[[], bool]:
    """Return whether a run has its first checkpoint."""
    records = out / "metrics.jsonl"
    return lambda: records.exists() and b'"checkpoint"' in records.read_bytes()


def _kill_ranks(command: psutil.Process) -> None:
    for each in command.children(recursive=True):
        if "frugal.engine.run" in each.cmdline():
            each.kill()


def _compared(one: list[float], other: list[float]) -> dict[str, Any]:
    """Both runs' losses, and their largest relative difference.

    Raises:
        RuntimeError: a run has fewer steps.
    """
    if len(one) != len(other):
        raise RuntimeError(f"{len(one)} steps and {len(other)}")
    differences = [abs(a - b) / (abs(a) or 1.0) for a, b in zip(one, other, strict=True)]  # emulated losses are 0
    return {"losses": [one, other], "largest_relative_difference": max(differences)}


if __name__ == "__main__":
    sys.exit(main())
