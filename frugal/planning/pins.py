"""Whether what the user pinned can be true at once."""

from frugal.errors import RequestError
from frugal.planning.request import Request


def check_pins(request: Request, world_size: int) -> None:
    """Micro-batch, accumulation steps and caps against the global batch on `world_size` ranks.

    Both pins together must be what the cells come out as: n = ceil(batch / (micro x ranks)) and
    micro = ceil(batch / (n x ranks)). A micro-batch alone is a cap that is reached unless the batch is too small.

    Raises:
        RequestError: they contradict each other; the message has the numbers.
    """
    batch, micro, steps = request.batch_samples, request.micro_batch, request.accumulation_steps
    gpus = f"{world_size} GPU{'s' if world_size > 1 else ''}"
    cap = request.micro_batch_cap
    if micro is not None and cap is not None and cap < micro:
        name = "--max-samples-per-gpu" if request.max_samples_per_gpu == cap else "--max-tokens-per-gpu"
        raise RequestError(
            f"--micro-batch {micro} is over the cap of {name}",
            because=f"{name} allows {cap} samples of {request.seq_len} tokens",
            hint=f"leave one of them out, or use --micro-batch {cap}",
        )
    if steps is None:
        return
    needed = -(-batch // (steps * world_size))
    if steps > batch:
        raise RequestError(
            f"--accumulation-steps {steps} is more than the {batch} samples of the global batch",
            because="every micro-step needs at least one sample",
            hint=f"use at most --accumulation-steps {batch}",
        )
    if micro is None:
        if cap is not None and cap < needed:
            raise RequestError(
                f"--accumulation-steps {steps} on {gpus} needs a micro-batch of {needed}",
                because=f"the caps allow {cap}",
                hint=f"use --accumulation-steps {-(-batch // (cap * world_size))}, or leave it out",
            )
        return
    fewest = -(-batch // (micro * world_size))
    if steps == fewest and micro == needed:
        return
    capacity = micro * steps * world_size
    ways = [f"--global-batch {capacity}"] if request.global_tokens is None else []
    if -(-batch // (fewest * world_size)) == micro:
        ways.insert(0, f"--accumulation-steps {fewest}")
    if -(-batch // (needed * world_size)) == steps:
        ways.insert(0, f"--micro-batch {needed}")
    raise RequestError(
        f"--micro-batch {micro} --accumulation-steps {steps} on {gpus} is {capacity}, not {batch}",
        because=f"{micro} x {steps} x {world_size} = {capacity} samples, and the global batch is {batch}",
        hint=f"use {', or '.join(ways)}" if ways else "leave one of the two out",
    )
