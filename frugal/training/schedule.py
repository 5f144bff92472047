"""Learning rates as pure functions of the number of optimizer steps done, so that a resumed run needs no state."""

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]


def factor(step: int, *, schedule: Schedule, warmup_steps: int, total_steps: int) -> float:
    """The factor on the peak learning rate in the step after `step` steps, of `total_steps`.

    Warmup rises linearly to 1 in `warmup_steps` steps; its first step is 1 / warmup_steps, never 0. Then, with p
    running from 0 to 1 over what is left: cosine (1 + cos(pi p)) / 2, linear 1 - p, or constant 1. The last step
    is not quite at 0, because a step with learning rate 0 would be wasted.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    if schedule == "linear":
        return 1.0 - progress
    return (1.0 + math.cos(math.pi * progress)) / 2.0
