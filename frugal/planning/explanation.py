"""Why a plan is what it is, and what would change it, as people read it."""

from collections.abc import Mapping, Sequence

from frugal.planning.choice import TIE, Option
from frugal.planning.ladder import ladder, short, table
from frugal.planning.plan import Plan
from frugal.planning.report import arithmetic
from frugal.planning.strategy import Strategy
from frugal.planning.what_if import Case
from frugal.units import format_bytes, format_seconds

NOT_REHEARSED = "predicted, not rehearsed"

_LETTERS = {
    "a": "activation checkpointing full",
    "s": "activation checkpointing selective",
    "h": "activation checkpointing offloaded",
    "t": "tiled loss",
    "o": "optimizer in host memory",
    "p": "parameters in host memory",
    "n": "optimizer on NVMe",
    "q": "parameters on NVMe",
}


def explanation(plan: Plan) -> list[list[str]]:
    """What the plan itself knows: what binds, why, and all strategies that were weighed."""
    return [
        [arithmetic(plan), f"{plan.strategy}: {format_seconds(plan.time.total_seconds)} a step"],
        binding(plan),
        ["why", *(f"  {sentence}" for sentence in plan.why[:-1])],
        ladder(plan),
    ]


def binding(plan: Plan) -> list[str]:
    """What keeps the micro-batch from being larger; the fullest moment, and the phases that come next."""
    memory = plan.memory
    device = "GPU" if plan.cluster.devices[0].kind == "cuda" else "rank"
    operator = memory.operator.removeprefix("aten.").removesuffix(".default")
    parts = sorted(((getattr(memory, name), name) for name in memory.CATEGORIES), reverse=True)
    largest = ", ".join(f"{name} {format_bytes(size)} ({size / memory.total_bytes:.0%})" for size, name in parts[:3])
    limit = memory.total_bytes + memory.headroom_bytes
    lines = [
        "what binds",
        *(f"  {sentence}" for sentence in plan.why[-1:]),
        f"  the peak of a {device} is in {memory.phase}{f' ({operator})' if operator else ''}: "
        f"{format_bytes(memory.total_bytes)} of {format_bytes(limit)} that may be used",
        f"  most of it: {largest}",
    ]
    phases = sorted(memory.phase_peaks.items(), key=lambda phase: -phase[1])
    others = [(name, size) for name, size in phases if name != memory.phase][:2]
    if others:
        below = ", ".join(f"{name} {format_bytes(max(0, memory.live_bytes - size))} lower" for name, size in others)
        lines.append(f"  next would be {below}")
    host = min((node.host_memory_bytes for node in plan.cluster.nodes if node.host_memory_bytes), default=None)
    if plan.strategy.offload_optimizer != "none":
        there = f" of {format_bytes(host)}" if host is not None else "; what it has is not known, see --host-mem"
        lines.append(f"  the host of a node holds {format_bytes(memory.host_bytes_per_node)}{there}")
    return lines


def improvements(plan: Plan, cases: Sequence[Case], found: Sequence[Option | None]) -> list[str]:
    """One line a change: what it would bring, with a sample's tokens taken into account."""
    before = plan.time.total_seconds / plan.request.seq_len
    rows = []
    for case, option in zip(cases, found, strict=True):
        if option is None:
            rows.append((case.name, "", "", "", "only a rehearsal could tell"))
        elif not option.fits or option.batch is None:
            rows.append((case.name, "-", "", "", f"does not fit, {format_bytes(-(option.headroom_bytes or 0))} short"))
        else:
            change = 100 * (option.seconds / case.request.seq_len / before - 1)
            a_token = " a token" if case.request.seq_len != plan.request.seq_len else ""
            batch = f"{option.batch.largest_cell} x {option.batch.accumulation_steps}"
            gain = f"{change:+.0f} %{a_token}" if abs(change) > 100 * (TIE - 1) else "no gain"
            strategy = "same strategy" if option.strategy == plan.strategy else short(option.strategy)
            rows.append((case.name, format_seconds(option.seconds), gain, batch, strategy))
    return [f"what would help ({NOT_REHEARSED})", *table(rows)] if rows else []


def what_if(
    plan: Plan,
    axes: Mapping[str, Sequence[int]],
    cases: Mapping[tuple[int, int, int], Case],
    found: Mapping[tuple[int, int, int], Option | None],
) -> list[str]:
    """A table a sample length, memory by GPUs: seconds a step, tokens/s of a GPU, and the strategy's letters."""
    kind = "GPU" if plan.cluster.devices[0].kind == "cuda" else "rank"
    each = " a node" if len(plan.cluster.nodes) > 1 else ""
    used: set[str] = set()
    lines = [f"what if: a step of {plan.batch.global_batch} samples ({NOT_REHEARSED})"]
    for seq_len in axes["seq-len"]:
        head = ("", *(f"{number} {kind}{'s' * (number > 1)}{each}" for number in axes["gpus"]), "")
        rows = [head]
        for memory in axes["mem"]:
            row = [format_bytes(memory)]
            for num_gpus in axes["gpus"]:
                key = (num_gpus, memory, seq_len)
                row.append(_cell(cases[key], found[key], used) if key in cases else "-")
            rows.append((*row, ""))
        lines += ["", f"samples of {seq_len} tokens", *table(rows)]
    legend = [f"{letter} {meaning}" for letter, meaning in _LETTERS.items() if letter in used]
    lines += ["", "  seconds a step, tokens/s of each device, Z ZeRO stage" + "".join(f"; {each}" for each in legend)]
    return lines


def _cell(case: Case, option: Option | None, used: set[str]) -> str:
    if option is None:
        return "?"
    if not option.fits:
        return f"- {format_bytes(-(option.headroom_bytes or 0))} short"
    letters = _letters(option.strategy)
    used.update(letters)
    rate = case.request.batch_samples * case.request.seq_len / option.seconds / case.cluster.world_size
    return f"{format_seconds(option.seconds)} {_rate(rate)} Z{option.strategy.zero_stage}{letters}"


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second / 1000:.1f}k/s" if tokens_per_second >= 1000 else f"{tokens_per_second:.0f}/s"


def _letters(strategy: Strategy) -> str:
    return (
        {"off": "", "full": "a", "selective": "s", "offloaded": "h"}[strategy.activation_checkpointing]
        + "t" * (strategy.loss == "tiled")
        + {"none": "", "cpu": "o", "nvme": "n"}[strategy.offload_optimizer]
        + {"none": "", "cpu": "p", "nvme": "q"}[strategy.offload_parameters]
    )
