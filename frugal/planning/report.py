"""A plan as people read it: plain text, the same in a terminal, a pipe and a log.

`reasons` say why it is what it is, one sentence a decision, in order of importance.

`summary` is what `frugal plan` prints, `explanation` what `frugal explain` knows from the plan alone; both have the
strategies that were weighed as a table.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from math import ceil

from frugal.config.hardware.cluster import Cluster, Node
from frugal.config.request import QUANTIZATIONS, Request
from frugal.planning.memory_report import assumptions, binding, breakdown_table
from frugal.planning.plan import Plan, Rejected, StepTime
from frugal.planning.search.candidate import TIE, Candidate, SearchResult
from frugal.planning.strategy import MODES_NOTE, Strategy, brief_name, short_name
from frugal.planning.table import WIDE, Table
from frugal.units import format_bytes, format_count, format_seconds, plural


def reasons(request: Request, cluster: Cluster, result: SearchResult) -> tuple[str, ...]:
    """The sentences of `Plan.why`; the last is about what binds."""
    return (
        result.measured_because,
        _sequence_parallel(request, cluster, result),
        _activation_checkpointing(request, result),
        _loss(request, result),
        _mlp(request, result),
        _zero_stage(request, cluster, result),
        *_offload(request, result),
        _secondary_partition(request, result),
        _segments(request, result),
        _micro_batch(request, cluster, result),
    )


def _sequence_parallel(request: Request, cluster: Cluster, result: SearchResult) -> str:
    """Empty where no ranks share samples."""
    number = result.chosen.strategy.sequence_parallel
    if number == 1:
        return ""
    return result.shared_because or f"each sample is shared by {plural(number, cluster.rank_noun)}, as asked"


def _activation_checkpointing(request: Request, result: SearchResult) -> str:
    taken, mode = result.chosen, result.chosen.strategy.activation_checkpointing
    word = "on" if mode == "full" else taken.strategy.checkpointing
    if request.layer_modes is not None:
        return f"activation checkpointing is {word}, as asked: {request.layer_modes}"
    if request.activation_checkpointing not in ("auto", "budget"):
        return f"activation checkpointing is {word}, as asked"
    others = _alternatives(result, lambda candidate: candidate.strategy.activation_checkpointing == "off")
    if mode == "off":
        if not others or others[0].time is None or taken.time is None:
            return "activation checkpointing is off: it is not needed"
        slower = others[0].seconds - taken.seconds
        if others[0].seconds <= taken.seconds * TIE:
            return "activation checkpointing is off: it is not needed, and recomputing would gain less than 2 %"
        return (
            f"activation checkpointing is off: it is not needed, and a step would take {format_seconds(slower)} longer"
        )
    what = f"activation checkpointing is {word}{_WHAT[mode]}"
    fitting = [candidate for candidate in others if candidate.fits]
    if fitting:
        what += f": without it {_batch_and_seconds(fitting[0], taken)}"
    elif others:
        what += f": {_does_not_fit(others)} without it"
    return what + (_price_of_one_mode(result) if mode == "budget" else "")


def _price_of_one_mode(result: SearchResult) -> str:
    """How much longer a step takes with the same activation checkpointing in all layers."""
    others = _alternatives(result, lambda candidate: candidate.strategy.activation_checkpointing == "budget")
    in_all = [candidate for candidate in others if candidate.fits and not candidate.is_draft]
    if not in_all:
        return ""
    longer = 100 * (in_all[0].seconds / result.chosen.seconds - 1)
    return f"; with {in_all[0].strategy.checkpointing} for all layers a step takes {longer:.0f} % longer"


_WHAT = {
    "full": "",
    "selective": ", so that products and attention are not repeated",
    "offloaded": ", with the layers' inputs in host memory",
    "budget": "",
}


def _loss(request: Request, result: SearchResult) -> str:
    taken = result.chosen
    if request.loss != "auto":
        return f"the loss is {request.loss}, as asked"
    if taken.strategy.loss == "plain":
        return ""
    others = _alternatives(result, lambda candidate: candidate.strategy.loss)
    fitting = [candidate for candidate in others if candidate.fits]
    if fitting:
        return f"the loss is tiled: with whole logits {_batch_and_seconds(fitting[0], taken)}"
    return f"the loss is tiled: {_does_not_fit(others)} with whole logits" if others else ""


def _mlp(request: Request, result: SearchResult) -> str:
    taken = result.chosen
    if request.mlp != "auto":
        return f"the MLP is {request.mlp}, as asked"
    if taken.strategy.mlp == "plain":
        return ""
    others = _alternatives(result, lambda candidate: candidate.strategy.mlp)
    return f"the MLP is tiled: {_does_not_fit(others)} with whole ones" if others else "the MLP is tiled"


def _zero_stage(request: Request, cluster: Cluster, result: SearchResult) -> str:
    stage = result.chosen.strategy.zero_stage
    if request.zero_stage is not None:
        return f"ZeRO-{stage}, as asked"
    if cluster.world_size == 1 and result.chosen.strategy.offload_optimizer == "none":
        why = "there is nothing to split" if stage == 0 else f"it sums {request.precision} gradients in fp32"
        return f"ZeRO-{stage} on one GPU: {why}"
    others = _alternatives(result, lambda candidate: candidate.strategy.zero_stage)
    simpler = [candidate for candidate in others if candidate.strategy.zero_stage < stage]
    fitting = [candidate for candidate in simpler if candidate.fits]
    if fitting:
        return (
            f"ZeRO-{stage}: a step takes {format_seconds(result.chosen.seconds)}, with "
            f"ZeRO-{fitting[0].strategy.zero_stage} {format_seconds(fitting[0].seconds)}"
        )
    if simpler:
        return f"ZeRO-{stage}: {_does_not_fit(simpler)} with ZeRO-{simpler[0].strategy.zero_stage}"
    if request.precision != "fp32" and stage == 2:
        return f"ZeRO-2: the lowest stage that sums {request.precision} gradients in fp32"
    return f"ZeRO-{stage}: the lowest stage possible"


def _offload(request: Request, result: SearchResult) -> list[str]:
    strategy = result.chosen.strategy
    if strategy.offload_optimizer == "none":
        return []
    if strategy.offload_ratio < 1:
        compiled = "each host compiles DeepSpeed's CPU Adam at its first training: it needs a C++ compiler and ninja"
        return [_in_part(request, result), f"{compiled}; --offload optimizer:1 does not"]
    what = "optimizer and parameters live" if strategy.offload_parameters != "none" else "the optimizer lives"
    where = "on disk, or in host memory" if strategy.offload_optimizer == "nvme" else "in host memory"
    if request.offload != "auto":
        return [f"{what} {where}, as asked"]
    others = [candidate for candidate in result.candidates if candidate.strategy.offload_optimizer == "none"]
    others = [candidate for candidate in others if candidate.headroom_bytes is not None]
    return [f"{what} {where}: {_does_not_fit(others)} on the GPUs alone" if others else f"{what} {where}"]


def _secondary_partition(request: Request, result: SearchResult) -> str:
    """What it is worth to keep ZeRO-3's parameters within nodes."""
    ranks = result.chosen.strategy.secondary_partition
    if ranks == 1:
        return ""
    what = f"{ranks} ranks of a node keep the parameters between them, so that later gathers of a step stay inside it"
    if request.secondary_partition is not None:
        return f"{what}, as asked"
    others = [each for each in result.candidates if each.fits and each.strategy.secondary_partition == 1]
    if not others:
        return what
    fastest = min(others, key=lambda candidate: candidate.seconds)
    sign = ">" if fastest.is_draft else ""
    return (
        f"{what}: a step takes {format_seconds(result.chosen.seconds)}, without {sign}{format_seconds(fastest.seconds)}"
    )


def _in_part(request: Request, result: SearchResult) -> str:
    """What it is worth to update a part of the optimizer's sub-groups on the device."""
    strategy = result.chosen.strategy
    what = f"{100 * strategy.offload_ratio:.3g} % of the optimizer's sub-groups are updated in host memory"
    if request.offload_ratio is not None:
        return f"{what}, as asked"
    whole = [
        candidate
        for candidate in result.candidates
        if candidate.fits and candidate.strategy.offload_optimizer == "cpu" and candidate.strategy.offload_ratio == 1
    ]
    if not whole:
        return f"{what}: nothing fits with all of them there, or with none"
    fastest = min(whole, key=lambda candidate: candidate.seconds)
    sign = ">" if fastest.is_draft else ""
    return (
        f"{what}, the rest on the GPUs: a step takes {format_seconds(result.chosen.seconds)}, with all of them there "
        f"{sign}{format_seconds(fastest.seconds)}"
    )


def _segments(request: Request, result: SearchResult) -> str:
    """What expandable segments are worth; nothing on CPU ranks."""
    other, memory = result.in_other_segments, result.memory
    if other is None:
        return ""
    is_on = result.chosen.strategy.expandable_segments
    with_other = "without" if is_on else "with"
    slack = f"{format_bytes(other.slack)} {with_other} them" if other.fits else f"it would not fit {with_other} them"
    asked = ", as asked" if request.expandable_segments is not None else ""
    return f"expandable segments are {'on' if is_on else 'off'}{asked}: slack is {format_bytes(memory.slack)}, {slack}"


def _micro_batch(request: Request, cluster: Cluster, result: SearchResult) -> str:
    candidate = result.chosen
    assert candidate.batch is not None
    batch, micro = candidate.batch, candidate.micro_batch
    if request.micro_batch is not None or request.accumulation_steps is not None:
        pinned = "micro-batch" if request.micro_batch is not None else "number of accumulation steps"
        return f"the {pinned} is as asked"
    if batch.accumulation_steps == 1:
        return "nothing binds: the whole global batch fits into one micro-step"
    if result.instead_of is not None and micro < candidate.largest_micro_batch:
        return f"nothing binds: micro-batch {candidate.largest_micro_batch} fits, {micro} is as was measured"
    if candidate.shortfall_of_next_bytes is None:
        return f"--max-tokens-per-gpu binds: it allows {candidate.largest_micro_batch} samples at once"
    sentence = (
        f"memory binds: micro-batch {candidate.largest_micro_batch + 1} would be about "
        f"{format_bytes(candidate.shortfall_of_next_bytes)} short"
    )
    if request.even and micro < candidate.largest_micro_batch:
        return (
            f"{sentence}; {candidate.largest_micro_batch} would fit, and {micro} is the largest that cuts "
            f"{batch.global_batch} samples evenly, as asked"
        )
    if len(cluster.kinds) > 1 and request.micro_batch_cap is None:
        if len(set(batch.micro_batch)) > 1:
            sentence += "; each kind of GPU takes what lets all of them be done together"
    elif micro < candidate.largest_micro_batch:
        steps = ceil(batch.global_batch / (candidate.largest_micro_batch * cluster.world_size))
        why = "in as many steps" if steps == batch.accumulation_steps else "into equal micro-batches at the same speed"
        sentence += f"; {candidate.largest_micro_batch} would fit, and {micro} cuts {batch.global_batch} samples {why}"
    return sentence


def _alternatives(result: SearchResult, trait: Callable[[Candidate], object]) -> list[Candidate]:
    """Options that differ from the chosen one in `trait` and offload as much: fitting and fast ones first."""
    taken = result.chosen
    others = [
        candidate
        for candidate in result.candidates
        if trait(candidate) != trait(taken)
        and candidate.headroom_bytes is not None
        and candidate.strategy.offload_optimizer == taken.strategy.offload_optimizer
        and candidate.strategy.offload_parameters == taken.strategy.offload_parameters
    ]
    return sorted(
        others, key=lambda candidate: (not candidate.fits, candidate.seconds, -(candidate.headroom_bytes or 0))
    )


def _batch_and_seconds(other: Candidate, taken: Candidate) -> str:
    """What another candidate would come to. A draft may promise too much."""
    at_most, at_least = ("at most ", "at least ") if other.is_draft else ("", "")
    seconds = f"a step takes {at_least}{format_seconds(other.seconds)} instead of {format_seconds(taken.seconds)}"
    if other.micro_batch == taken.micro_batch:
        return seconds
    return f"{at_most}micro-batch {other.micro_batch} fits instead of {taken.micro_batch}, and {seconds}"


def _does_not_fit(candidates: list[Candidate]) -> str:
    """That the nearest of `candidates` does not fit, and by how much."""
    nearest = max(candidates, key=lambda candidate: candidate.headroom_bytes or 0)
    what = "one sample does" if nearest.micro_batch == 1 else f"micro-batch {nearest.micro_batch} does"
    at_least = "at least " if nearest.memory is None or nearest.is_draft else ""
    return f"{what} not fit ({at_least}{format_bytes(-(nearest.headroom_bytes or 0))} short)"


SPLIT_MATTERS = "the gradient depends on how a global batch is split"
PADDING_MATTERS = "the gradient depends on padding"
DROPOUT = "dropout draws its masks for each rank and micro-step: another split of a global batch draws others"
LAYER_DROP = "LayerDrop is off"
DRAWN_PARTS = "which parameters are used is drawn at random"
ADDED_LOSS = "its loss is more than a sum over targets"
"""How the warnings of a plan begin that training repeats; dropout's is ordinary, so it does not."""

SHOWN_REJECTED = 7

Block = list[str] | Table
"""A part of a report: lines, or a table."""


def as_text(blocks: Iterable[Block]) -> str:
    """Plain lines, with an empty one between blocks; tables aligned by spaces."""
    lines = (block.lines if isinstance(block, Table) else block for block in blocks)
    return "\n\n".join("\n".join(block) for block in lines if block)


def summary(plan: Plan) -> str:
    """Everything a plan says, as text."""
    return as_text(summary_blocks(plan))


def summary_blocks(plan: Plan) -> list[Block]:
    """Everything a plan says."""
    return [
        [plan.arithmetic],
        [*_facts(plan), *_data(plan)],
        breakdown_table(plan),
        _list("why", plan.why),
        _list("note", plan.warnings),
        strategy_table(plan, shown=SHOWN_REJECTED, width=WIDE) if plan.rejected else [],
        _list("defaults", [", ".join(_default(plan, name) for name in plan.defaults)] if plan.defaults else []),
        _list("assumed", assumptions(plan)),
    ]


def _facts(plan: Plan) -> list[str]:
    request, model = plan.request, plan.model
    parameters = f"{format_count(model.parameters)} parameters"
    if model.trainable_parameters != model.parameters:
        adapter = f": LoRA {request.lora}" if request.lora is not None else ""
        base = f"; base in {QUANTIZATIONS[request.quantize]}" if request.quantize is not None else ""
        parameters += f" ({format_count(model.trainable_parameters)} trainable{adapter}{base})"
    clipping = f", gradient norm at most {request.gradient_clipping:g}" if request.gradient_clipping else ""
    rate = request.learning_rate_scaling or f"{request.learning_rate:g}"
    time = plan.time
    parts = [
        (time.compute_seconds, "compute"),
        (time.recompute_seconds, "recompute"),
        (time.communication_seconds, "communication"),
        (time.offload_seconds, "offload"),
        (time.optimizer_seconds, "optimizer"),
    ]
    packed = ", packed with documents" if request.pack else ""
    shares = ", ".join(f"{name} {format_seconds(seconds)}" for seconds, name in parts if seconds)
    rows = [
        (
            "model",
            f"{request.model}, {model.task}, {parameters}, samples of {request.seq_len} tokens{packed}",
        ),
        ("cluster", _cluster(plan)),
        ("strategy", f"{plan.strategy}"),
        (
            "numbers",
            f"{request.precision}, gradients summed in {plan.strategy.gradient_accumulation_dtype}"
            + (", master weights and optimizer states in bf16" if request.optimizer_states == "bf16" else ""),
        ),
        ("optimizer", f"{_optimizer(request)}, learning rate {rate}, {_numbers(request)}{clipping}"),
        ("step", f"{format_seconds(time.total_seconds)} estimated: {shares}"),
    ]
    return [f"{name:<10} {text}" for name, text in rows]


def _data(plan: Plan) -> list[str]:
    """What the plan knows of the data, and what it makes of it."""
    grouping, batch = plan.grouping, plan.batch
    if grouping is None:
        return []
    source = f" ({grouping.source})" if grouping.source else ""
    largest = max(batch.micro_batch) * plan.request.seq_len // (batch.shortest or plan.request.seq_len)
    rows = [
        (
            "data",
            f"{grouping.num_samples:,} samples{source}, {format_count(grouping.num_tokens)} tokens: half have up to "
            f"{grouping.median}, 99 % up to {grouping.percentile_99}, the longest has {grouping.longest}",
        ),
        (
            "typical",
            f"{plural(grouping.step_samples, 'sample')} are {grouping.step_tokens:,} tokens in "
            f"{plural(grouping.micro_steps, 'micro-step')}, with up to {plural(largest, 'sample')} in one micro-batch",
        ),
        (
            "padding",
            f"{100 * grouping.padding:.0f} % of the tokens; micro-batches of "
            f"{plural(max(batch.micro_batch), 'sample')} in random order would have "
            f"{100 * grouping.fixed_padding:.0f} %",
        ),
    ]
    return [f"{name:<10} {text}" for name, text in rows]


def _optimizer(request: Request) -> str:
    momentum = f" with momentum {request.momentum:g}" if request.momentum else ""
    implementation = f" ({request.optimizer_implementation})" if request.optimizer_implementation else ""
    return f"{request.optimizer}{implementation}{momentum}"


def _numbers(request: Request) -> str:
    """What else decides an update."""
    decay = f"weight decay {request.weight_decay:g}" + ("" if request.decays_all else " but of norms and biases")
    if request.optimizer == "sgd":
        return decay
    return f"betas {request.betas[0]:g} and {request.betas[1]:g}, epsilon {request.epsilon:g}, {decay}"


def _cluster(plan: Plan) -> str:
    kinds = Counter(map(_node, plan.cluster.nodes))
    if len(plan.cluster.nodes) == 1:
        return next(iter(kinds))
    return " + ".join(f"{plural(count, 'node')} of {node}" for node, count in kinds.items())


def _node(node: Node) -> str:
    devices = Counter((device.name, device.memory_bytes) for device in node.devices)
    return " and ".join(f"{count} x {name} with {format_bytes(memory)}" for (name, memory), count in devices.items())


def _default(plan: Plan, name: str) -> str:
    value = plan.batch.global_batch if name == "global_batch" else getattr(plan.request, name)
    return f"{name.replace('_', ' ')} {value:g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"


def _list(title: str, lines: object) -> list[str]:
    texts = list(lines) if isinstance(lines, list | tuple) else []
    return [title, *(f"  {text}" for text in texts)] if texts else []


HEAD = ("step", "", "batch", "peak", "headroom", "")


def strategy_table(plan: Plan, *, shown: int | None = None, width: int | None = None) -> Table:
    """The chosen strategy, then the others, fastest first; at most `shown` of these; `width` as of `Table`.

    A batch is micro-batch x accumulation steps.
    """
    rejected = plan.rejected if shown is None else plan.rejected[:shown]
    rest = len(plan.rejected) - len(rejected)
    has_bounds = any(strategy.is_bound for strategy in rejected)
    notes = ["> lower bound, < upper bound: pruned, not fully evaluated"] if has_bounds else []
    notes += [f"{rest} more: `frugal explain`"] if rest else []
    name = short_name if width is None else brief_name
    notes += [] if width is None else [MODES_NOTE]
    return Table(
        title="strategies",
        rows=(HEAD, _chosen(plan, name), *(_row(plan, strategy, name) for strategy in rejected)),
        note="; ".join(notes),
        has_head=True,
        width=width,
    )


def _chosen(plan: Plan, name: Callable[[Strategy], str]) -> tuple[str, ...]:
    batch, memory = plan.batch, plan.memory
    return (
        format_seconds(plan.time.total_seconds),
        "1.00x",
        f"{batch.largest_micro_batch} x {batch.accumulation_steps}",
        format_bytes(memory.total_bytes),
        format_bytes(memory.headroom_bytes),
        f"{name(plan.strategy)}: chosen",
    )


def _row(plan: Plan, rejected: Rejected, name: Callable[[Strategy], str]) -> tuple[str, ...]:
    lower, upper = (">", "<") if rejected.is_bound else ("", "")
    seconds, headroom = rejected.step_seconds, rejected.headroom_bytes
    fits = seconds is not None and (headroom is None or headroom >= 0)
    steps = f" x {rejected.accumulation_steps}" if rejected.accumulation_steps else ""
    peak = f"{lower}{format_bytes(rejected.peak_bytes)}" if rejected.peak_bytes is not None else ""
    return (
        f"{lower}{format_seconds(seconds)}" if fits and seconds is not None else "-",
        _times(seconds, plan.time.total_seconds) if fits and seconds is not None else "",
        f"{rejected.micro_batch}{steps}",
        peak,
        f"{upper}{format_bytes(headroom)}" if headroom is not None else "",
        f"{name(rejected.strategy)}: {_verdict(plan.time, rejected)}",
    )


def _times(seconds: float, chosen: float) -> str:
    return f"{seconds / chosen:.2f}x" if chosen else ""


def _verdict(chosen: StepTime, rejected: Rejected) -> str:
    """The reason in few words: of what is slower, the part of the step that is longer."""
    if rejected.reason.startswith("cannot fit"):
        return "cannot fit"
    if rejected.time is None or not rejected.reason.startswith(("slower", "cannot be faster")):
        return rejected.reason
    parts = {
        name: getattr(rejected.time, f"{name}_seconds") - getattr(chosen, f"{name}_seconds")
        for name in ("compute", "recompute", "communication", "offload", "optimizer")
    }
    longest = max(parts, key=lambda name: parts[name])
    return f"{longest} +{format_seconds(parts[longest])}" if parts[longest] > 0 else rejected.reason


def explanation(plan: Plan, *, in_full: bool = False) -> list[Block]:
    """What the plan itself knows: what binds, why, and all strategies that were weighed; `in_full` what it is, too."""
    reasoned: list[Block] = [
        binding(plan),
        ["why", *(f"  {sentence}" for sentence in plan.why[:-1])],
        strategy_table(plan, width=WIDE),
    ]
    if not in_full:
        return [[plan.arithmetic, f"{plan.strategy}: {format_seconds(plan.time.total_seconds)} a step"], *reasoned]
    headline, facts, breakdown, _, notes, _, defaults, assumed = summary_blocks(plan)
    return [headline, facts, breakdown, *reasoned, notes, defaults, assumed]
