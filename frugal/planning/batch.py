"""A global batch, cut into cells: one a rank and micro-step, none lost and none invented."""

from collections.abc import Sequence
from dataclasses import dataclass

from frugal.errors import RequestError


@dataclass(frozen=True)
class Cells:
    """Samples of every rank in every micro-step.

    `sizes[rank][micro_step]` has shape (world size, accumulation steps). All ranks have the same number of
    micro-steps, because ZeRO communicates in each one; a cell may be empty.
    """

    sizes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        assert len({len(steps) for steps in self.sizes}) == 1, "ranks would run different numbers of micro-steps"

    @property
    def global_batch(self) -> int:
        """Samples over all ranks and micro-steps."""
        return sum(map(sum, self.sizes))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.sizes)

    @property
    def accumulation_steps(self) -> int:
        """Micro-steps per optimizer step."""
        return len(self.sizes[0])

    @property
    def is_uniform(self) -> bool:
        """Whether all cells are equal, so that `micro-batch x accumulation x world` is the global batch."""
        return len({size for steps in self.sizes for size in steps}) == 1

    def starts(self, rank: int) -> tuple[int, ...]:
        """Where each of the rank's cells begins in the global batch, samples.

        Cells lie in the batch micro-step by micro-step, within it rank by rank.
        """
        starts, position = [], 0
        for step in range(self.accumulation_steps):
            starts.append(position + sum(sizes[step] for sizes in self.sizes[:rank]))
            position += sum(sizes[step] for sizes in self.sizes)
        return tuple(starts)


def cells(global_batch: int, max_samples: Sequence[int], *, num_steps: int | None = None) -> Cells:
    """The fewest micro-steps that hold `global_batch` samples, cut as evenly as whole samples allow.

    `max_samples` has one cap a rank. With n = ceil(batch / sum of caps) micro-steps, or `num_steps` if given,
    micro-step k gets b_k samples, the b_k differing by at most one. Of these rank r is due b_k * cap_r / sum(caps); it
    gets that rounded down or up, so never more than its cap, and the roundings up go to the ranks that have fallen
    furthest behind. With equal caps all cells differ by at most one sample, and so do the ranks' totals.

    Raises:
        RequestError: a batch or a cap below 1, or `num_steps` that cannot hold the batch or would stay empty.
    """
    if global_batch < 1:
        raise RequestError(f"a global batch of {global_batch} samples trains nothing", hint="ask for at least 1 sample")
    if not max_samples or min(max_samples) < 1:
        raise RequestError(
            f"the micro-batch caps {list(max_samples)} leave a rank without samples",
            hint="every rank must take at least 1 sample",
        )
    total_cap = sum(max_samples)
    fewest = -(-global_batch // total_cap)
    num_steps = fewest if num_steps is None else num_steps
    if not fewest <= num_steps <= global_batch:
        raise RequestError(
            f"{num_steps} accumulation steps cannot hold a global batch of {global_batch}",
            because=f"{total_cap} samples fit into one, and each needs at least one",
            hint=f"between {fewest} and {global_batch} accumulation steps can",
        )
    given = [0] * len(max_samples)
    sizes: list[list[int]] = [[] for _ in max_samples]
    position = 0
    for step in range(num_steps):
        end = global_batch * (step + 1) // num_steps
        step_samples, position = end - position, end
        row = [step_samples * cap // total_cap for cap in max_samples]
        fractional = [rank for rank, cap in enumerate(max_samples) if step_samples * cap % total_cap]
        behind = sorted(
            fractional, key=lambda rank: (given[rank] + row[rank]) * total_cap - position * max_samples[rank]
        )
        for rank in behind[: step_samples - sum(row)]:
            row[rank] += 1
        for rank, size in enumerate(row):
            sizes[rank].append(size)
            given[rank] += size
    return Cells(tuple(tuple(steps) for steps in sizes))
