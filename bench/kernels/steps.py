"""`python -m bench.kernels.steps`: kernels that an optimizer step launches on an emulated card, by contender, how often
the host waits for the card, and the processor time of the host.

The cases and contenders are those of `bench.gpu.speed`; an emulated card launches what a real one does, and computes
nothing. It needs the environment of `python -m bench.emulated_gpu.setup --liger`. A host that cannot launch kernels as
fast as the card runs them slows down the step, as many small ones do: under LoRA most kernels are small. So does what
the host does while the card waits: after each wait of the host until enough is launched again. Its milliseconds are the
least of `STEPS` steps, because other work on the machine only makes a step longer, and those of this machine: compare
those of one call.

    python -m bench.kernels.steps [--only CASE] [--names CASE CONTENDER] [--folder .venv-emulated]

`--names` lists the kernels of one contender by name. All numbers are kept in `bench/results/steps.json`.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import environment as measured_on
from bench.emulated_gpu import environment
from bench.gpu import speed

RESULTS = Path(__file__).parents[1] / "results" / "steps.json"
CARD = "h100"
STEPS = 10


def main() -> int:
    """Count each contender in a process of its own; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.steps", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=speed.CASES, help="these cases; the others' counts are kept")
    parser.add_argument("--names", nargs=2, metavar=("CASE", "CONTENDER"), help="print one contender's kernels by name")
    parser.add_argument("--folder", type=Path, help="of the emulated environment")
    parser.add_argument("--count", nargs=3, metavar=("CASE", "CONTENDER", "PLANS"), help="used by the command itself")
    asked = parser.parse_args()
    if asked.count:
        print(json.dumps(count(*asked.count)))
        return 0
    with TemporaryDirectory() as name:
        plans = Path(name)
        cases = asked.names[:1] if asked.names else asked.only or list(speed.CASES)
        speed.make_plans(plans, environment.python(asked.folder), cases)
        if asked.names:
            for kernel, number in Counter(_in_a_process(*asked.names, plans, asked.folder)["kernels"]).most_common():
                print(f"{number:6} {kernel}")
            return 0
        kept = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else {}
        for case in cases:
            kept[case] = {}
            for contender in speed.CONTENDERS:
                found = _in_a_process(case, contender, plans, asked.folder)
                if "kernels" in found:
                    found["kernels"] = sum(found["kernels"].values())
                kept[case][contender] = found
                print(f"{case:20} {contender:16} {found}", flush=True)
            head = measured_on.environment("python -m bench.kernels.steps") | {"device": f"emulated {CARD}"}
            RESULTS.write_text(json.dumps(head | {"cases": kept}, indent=1) + "\n")
    return int(any("failure" in found for row in kept.values() for found in row.values()))


def count(case: str, contender: str, plans: str) -> dict[str, Any]:
    """Train in this process; return its last step's kernels, by name, and waits, and the host's least milliseconds."""
    import emulated_gpu_answers  # noqa: F401  # new blocks read as zeros

    from bench.kernels.counting import launches_and_waits

    found: list[tuple[Counter[str], Counter[str]]] = []
    seconds: list[float] = []

    class Counting(speed.Timing):
        def begin(self) -> None:
            super().begin()
            launches_and_waits()
            self._processor_seconds = time.process_time()  # of all threads: backward has its own

        def end(self) -> None:
            seconds.append(time.process_time() - self._processor_seconds)
            found.append(launches_and_waits())
            super().end()

    speed.WARM_UP, speed.STEPS, speed.RECORDED = 2, STEPS, 0
    speed.Timing = Counting
    speed.train(case, contender, Path(plans))
    kernels, waits = found[-1]
    milliseconds = round(1000 * min(seconds[speed.WARM_UP :]), 1)
    return {"kernels": kernels, "waits": waits.total(), "host_milliseconds": milliseconds}


def _in_a_process(case: str, contender: str, plans: Path, folder: Path | None) -> dict[str, Any]:
    made = environment.environment(CARD, kernels=plans / "kernels")
    return speed.answered(
        [environment.python(folder), "-m", __spec__.name, "--count", case, contender, str(plans)], made
    )


if __name__ == "__main__":
    sys.exit(main())
