"""`python -m bench.loops.measure SCRIPT.py:STEP`: what a loop takes on a card, as torch counts it. One JSON object.

The same parts and steps as `frugal dryrun SCRIPT.py:STEP`, really, with a build of torch for CUDA. Cycles are collected
before every step, as a dry run does.
"""

import gc
import json
import sys

import torch

from frugal.tools.own_loop.run import NUM_STEPS, Script


def main() -> None:
    """Measure the script named on the command line."""
    script = Script.load(sys.argv[1])
    script.prepare()
    prepared = torch.cuda.max_memory_allocated()
    steps: list[int] = []

    def begin() -> None:
        gc.collect()
        steps.append(torch.cuda.max_memory_allocated())

    script.run(NUM_STEPS, before_each=begin)
    result = {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "initialisation_bytes": prepared,
        "first_step_bytes": steps[1],
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
