"""Checks that the pins of a batch do not contradict each other on a number of ranks."""

from frugal.config.request import Request
from frugal.errors import refuse
from frugal.units import plural


def check_pins(request: Request, world_size: int) -> None:
    """Check micro-batch, accumulation steps and caps against the global batch on `world_size` ranks.

    Both pins together must be what the micro-batches come out as: n = ceil(batch / (micro x ranks)) and
    micro = ceil(batch / (n x ranks)). A micro-batch alone is a cap that is reached unless the batch is too small.

    Raises:
        RequestError: they contradict each other; the message has the numbers.
    """
    batch, micro, steps = request.batch_samples, request.micro_batch, request.accumulation_steps
    gpus, shared_by = plural(world_size, "GPU"), request.sequence_parallel or 1
    if shared_by > 1:
        ways = [f"--sequence-parallel {n}" for n in range(2, world_size + 1) if world_size % n == 0]
        refuse(
            (
                world_size % shared_by,
                f"--sequence-parallel {shared_by} does not divide {gpus}",
                "",
                f"use {', '.join(ways) or 'none'}",
            )
        )
        world_size //= shared_by
        gpus = f"{plural(world_size, 'group')} of {plural(shared_by, 'GPU')}"
    unit, parts = world_size, [gpus]
    if micro is not None and micro * world_size != batch:
        unit *= micro
        parts.append(f"micro-batch {micro}")
    if steps is not None:
        unit *= steps
        parts.append(plural(steps, "accumulation step"))
    below = batch // unit * unit
    near = sorted(filter(None, (below, below + unit)), key=lambda size: abs(size - batch))
    cap = request.micro_batch_cap
    needed = 0 if steps is None else -(-batch // (steps * world_size))
    refuse(
        (
            request.even and below != batch,
            f"equal micro-batches are impossible for a global batch of {batch} with {' x '.join(parts)}",
            f"equal micro-batches come to a multiple of {unit} samples",
            f"use --global-batch {' or '.join(map(str, near))}",
        ),
        (
            micro is not None and cap is not None and cap < micro,
            f"--micro-batch {micro} is over the cap of --max-tokens-per-gpu",
            f"it allows {cap} samples of {request.seq_len} tokens",
            f"leave one of them out, or use --micro-batch {cap}",
        ),
        (
            steps is not None and steps > batch,
            f"--accumulation-steps {steps} is more than the {batch} samples of the global batch",
            "every micro-step needs at least one sample",
            f"use at most --accumulation-steps {batch}",
        ),
        (
            micro is None and cap is not None and cap < needed,
            f"--accumulation-steps {steps} on {gpus} needs a micro-batch of {needed}",
            f"--max-tokens-per-gpu allows {cap}",
            f"use --accumulation-steps {-(-batch // ((cap or 1) * world_size))}, or leave it out",
        ),
    )
    if steps is None or micro is None:
        return
    fewest = -(-batch // (micro * world_size))
    capacity = micro * steps * world_size
    ways = [f"--global-batch {capacity}"] if request.global_tokens is None else []
    if -(-batch // (fewest * world_size)) == micro:
        ways.insert(0, f"--accumulation-steps {fewest}")
    if -(-batch // (needed * world_size)) == steps:
        ways.insert(0, f"--micro-batch {needed}")
    refuse(
        (
            (steps, micro) != (fewest, needed),
            f"--micro-batch {micro} --accumulation-steps {steps} on {gpus} is {capacity}, not {batch}",
            f"{micro} x {steps} x {world_size} = {capacity} samples, and the global batch is {batch}",
            f"use {', or '.join(ways)}" if ways else "leave one of the two out",
        )
    )
