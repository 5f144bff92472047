"""A plan as plain text, the same in a terminal, a pipe and a log.

`reasons` are its decisions, one sentence each, in order of importance. `summary` is what `frugal plan -v` prints,
`explanation` what `frugal explain` knows from the plan alone; both have the evaluated strategies as a table.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from math import ceil

from frugal.config.hardware.cluster import ASSUMED_CAPABILITY, Cluster, Node
from frugal.config.request import Request
from frugal.planning.memory.profile import VARLEN
from frugal.planning.memory_report import assumptions, binding, breakdown_table
from frugal.planning.model_facts import FUSED_LOSS
from frugal.planning.plan import KERNELS, Plan, Rejected, StepTime
from frugal.planning.search.candidate import TIE, Candidate, SearchResult
from frugal.planning.strategy import MODES_NOTE, Strategy, brief_name
from frugal.planning.table import WIDE, Table
from frugal.units import format_bytes, format_count, format_seconds, plural


def reasons(request: Request, cluster: Cluster, result: SearchResult) -> tuple[str, ...]:
    """Return the sentences of `Plan.why`, the last of which says what binds."""
    strategy = result.chosen.strategy
    sentences: list[str] = []
    if strategy.sequence_parallel > 1:
        ranks = plural(strategy.sequence_parallel, cluster.rank_noun)
        sentences.append(result.shared_because or f"each sample is shared by {ranks}, as asked")
    sentences.append(_activation_checkpointing(request, result))
    for name, asked, taken, what in (
        ("loss", request.loss, strategy.loss, "whole logits"),
        ("mlp", request.mlp, strategy.mlp, "whole ones"),
    ):
        noun = "MLP" if name == "mlp" else name
        if asked != "auto":
            sentences.append(f"the {noun} is {asked}, as asked")
        elif taken == "tiled":
            plain = _compared(result, lambda each, name=name: getattr(each, name) == "plain", f"with {what}")  # type: ignore[misc]  # `name` as it is now
            sentences.append(f"the {noun} is tiled{plain}")
    sentences += _kernels(request, cluster, result)
    sentences.append(_zero_stage(request, cluster, result))
    sentences += _offload(request, result)
    sentences.append(what_binds(request, cluster, result.chosen))
    return tuple(sentences)


def _kernels(request: Request, cluster: Cluster, result: SearchResult) -> list[str]:
    """Return which kernels are fused, and which ones attention takes."""
    strategy = result.chosen.strategy
    names, modules, sentences = [], "", []
    if strategy.kernels == "liger":
        fused = ", ".join(each for each in result.fused if each != FUSED_LOSS or strategy.loss == "tiled")
        names.append("liger")
        modules = f"; Liger's run {fused}" + (", as asked" if request.kernels == "liger" else "")
    if VARLEN in result.attention:
        names.append(f"{VARLEN} attention")
    if names:
        sentences.append(f"{KERNELS} {', '.join(names)}{modules}")
    if attention := " and ".join(each for each in result.attention if each != VARLEN):
        number = "{}.{}".format(*min(device.compute_capability or ASSUMED_CAPABILITY for device in cluster.kinds))
        sentences.append(f"attention is {attention}: torch's choice for {request.precision} on capability {number}")
    return sentences


def _activation_checkpointing(request: Request, result: SearchResult) -> str:
    taken, mode = result.chosen, result.chosen.strategy.activation_checkpointing
    what = f"activation checkpointing is {'on' if mode == 'full' else taken.strategy.checkpointing}"
    if request.layer_modes is not None:
        return f"{what}, as asked: {request.layer_modes}"
    if request.activation_checkpointing not in ("auto", "budget"):
        return f"{what}, as asked"
    others = _alternatives(result, lambda strategy: strategy.activation_checkpointing not in (mode, "budget"))
    if mode == "off":
        slower = others[0].seconds - taken.seconds if others and others[0].time is not None else 0.0
        if slower <= (TIE - 1) * taken.seconds:
            return f"{what}: it is not needed"
        return f"{what}: it is not needed, and a step would take {format_seconds(slower)} longer"
    what += _compared(result, lambda strategy: strategy.activation_checkpointing == "off", "without it")
    in_all = [candidate for candidate in others if candidate.fits and not candidate.is_draft]
    if mode == "budget" and in_all:
        longer = 100 * (in_all[0].seconds / taken.seconds - 1)
        what += f"; with {in_all[0].strategy.checkpointing} for all layers a step takes {longer:.0f} % longer"
    return what


def _zero_stage(request: Request, cluster: Cluster, result: SearchResult) -> str:
    strategy = result.chosen.strategy
    stage = strategy.zero_stage
    if request.zero_stage is not None:
        return f"ZeRO-{stage}, as asked"
    sums = f"sums {request.precision} gradients in fp32"
    if cluster.world_size == 1 and strategy.offload_optimizer == "none":
        return f"ZeRO-{stage} on one GPU: {'there is nothing to split' if stage == 0 else f'it {sums}'}"
    simpler = _alternatives(result, lambda other: other.zero_stage < stage)
    if simpler:
        lower = simpler[0].strategy.zero_stage
        return f"ZeRO-{stage}{_compared(result, lambda other: other.zero_stage == lower, f'with ZeRO-{lower}')}"
    lowest = f"the lowest stage that {sums}" if request.precision != "fp32" and stage == 2 else "the lowest possible"
    return f"ZeRO-{stage}: {lowest}"


def _offload(request: Request, result: SearchResult) -> list[str]:
    strategy = result.chosen.strategy
    if strategy.offload_optimizer == "none":
        return []
    if strategy.offload_ratio < 1:
        part = f"{100 * strategy.offload_ratio:.3g} % of the optimizer's sub-groups are updated in host memory"
        if request.offload_ratio is not None:
            part += ", as asked"
        else:
            part += _compared(result, lambda other: other.offload_ratio == 1, "with all of them there")
        compiled = "each host compiles DeepSpeed's CPU Adam at its first training: it needs a C++ compiler and ninja"
        return [part, f"{compiled}; --offload optimizer:1 does not"]
    what = "optimizer and parameters live" if strategy.offload_parameters != "none" else "the optimizer lives"
    where = "on disk, or in host memory" if strategy.offload_optimizer == "nvme" else "in host memory"
    if request.offload != "auto":
        return [f"{what} {where}, as asked"]
    others = [each for each in result.candidates if each.strategy.offload_optimizer == "none"]
    others = [each for each in others if each.headroom_bytes is not None]
    return [f"{what} {where}: {_does_not_fit(others)} on the GPUs alone" if others else f"{what} {where}"]


def what_binds(request: Request, cluster: Cluster, candidate: Candidate) -> str:
    """Return what keeps a candidate that fits from larger micro-batches, in a sentence."""
    assert candidate.batch is not None
    batch, micro, largest = candidate.batch, candidate.micro_batch, candidate.largest_micro_batch
    if request.micro_batch is not None or request.accumulation_steps is not None:
        if micro < (request.micro_batch or 0):
            return (
                f"the global batch binds: it has {micro} samples for each {cluster.rank_noun}, and "
                f"{request.micro_batch} were asked for"
            )
        pinned = "micro-batch" if request.micro_batch is not None else "number of accumulation steps"
        return f"the {pinned} is as asked"
    if batch.accumulation_steps == 1:
        return "nothing binds: the whole global batch fits into one micro-step"
    if candidate.shortfall_of_next_bytes is None:
        return f"--max-tokens-per-gpu binds: it allows {largest} samples at once"
    short = format_bytes(candidate.shortfall_of_next_bytes)
    where = f" on the {cluster.rank_noun} with the most" if len(cluster.kinds) > 1 else ""
    sentence = f"memory binds: micro-batch {largest + 1} would be about {short} short{where}"
    if request.even and micro < largest:
        return (
            f"{sentence}; {largest} would fit, and {micro} is the largest that cuts {batch.global_batch} samples "
            "evenly, as asked"
        )
    if len(cluster.kinds) > 1 and request.micro_batch_cap is None:
        if len(set(batch.micro_batch)) > 1:
            sentence += "; each kind of GPU takes what lets all of them be done together"
    elif micro < largest:
        steps = ceil(batch.global_batch / (largest * cluster.world_size))
        why = "in as many steps" if steps == batch.accumulation_steps else "into equal micro-batches at the same speed"
        sentence += f"; {largest} would fit, and {micro} cuts {batch.global_batch} samples {why}"
    return sentence


def _alternatives(result: SearchResult, trait: Callable[[Strategy], bool]) -> list[Candidate]:
    """Return evaluated candidates with a trait that offload as much as the chosen one: fitting and fast ones first."""
    taken = result.chosen.strategy
    places = taken.offload_optimizer, taken.offload_parameters
    others = [
        each
        for each in result.candidates
        if trait(each.strategy)
        and each.headroom_bytes is not None
        and (each.strategy.offload_optimizer, each.strategy.offload_parameters) == places
    ]
    return sorted(others, key=lambda each: (not each.fits, each.seconds, -(each.headroom_bytes or 0)))


def _compared(result: SearchResult, trait: Callable[[Strategy], bool], words: str) -> str:
    """Say what the best alternative with a trait would come to; a draft may promise too much."""
    others, taken = _alternatives(result, trait), result.chosen
    if not others:
        return ""
    other = others[0]
    if not other.fits:
        return f": {_does_not_fit(others)} {words}"
    at_most, at_least = ("at most ", "at least ") if other.is_draft else ("", "")
    seconds = f"a step takes {at_least}{format_seconds(other.seconds)} instead of {format_seconds(taken.seconds)}"
    if other.micro_batch == taken.micro_batch:
        return f": {words} {seconds}"
    return f": {words} {at_most}micro-batch {other.micro_batch} fits instead of {taken.micro_batch}, and {seconds}"


def _does_not_fit(candidates: list[Candidate]) -> str:
    """Say that the nearest of `candidates` does not fit, and by how much."""
    nearest = max(candidates, key=lambda candidate: candidate.headroom_bytes or 0)
    what = "one sample does" if nearest.micro_batch == 1 else f"micro-batch {nearest.micro_batch} does"
    at_least = "at least " if nearest.memory is None or nearest.is_draft else ""
    return f"{what} not fit ({at_least}{format_bytes(-(nearest.headroom_bytes or 0))} short)"


SPLIT_MATTERS = "the gradient depends on how a global batch is split"
PADDING_MATTERS = "the gradient depends on padding"
DROPOUT = "dropout masks depend on how the batch is split across ranks and micro-steps"
DRAWS = "numbers that forward draws at random depend on how the batch is split across ranks and micro-steps"
LAYER_DROP = "LayerDrop is off"
DRAWN_PARTS = "which parameters are used is drawn at random"
ADDED_LOSS = "its loss is more than a sum over targets"
"""The beginnings of a plan's warnings that training repeats, except for those of random draws, which are ordinary."""

SHOWN_REJECTED = 7

Block = list[str] | Table
"""A part of a report: lines, or a table."""


def as_text(blocks: Iterable[Block]) -> str:
    """Return blocks as plain text, separated by empty lines."""
    lines = (block.lines if isinstance(block, Table) else block for block in blocks)
    return "\n\n".join("\n".join(block) for block in lines if block)


def summary(plan: Plan) -> str:
    """Return everything a plan says, as text."""
    return as_text(summary_blocks(plan))


def summary_blocks(plan: Plan) -> list[Block]:
    """Return everything a plan says, as blocks."""
    return [
        [plan.arithmetic],
        [*_facts(plan), *_data(plan)],
        breakdown_table(plan),
        _list("why", plan.why),
        _list("note", plan.warnings),
        strategy_table(plan, shown=SHOWN_REJECTED) if plan.rejected else [],
        _list("defaults", [", ".join(_default(plan, name) for name in plan.defaults)] if plan.defaults else []),
        _list("assumed", assumptions(plan)),
    ]


def _facts(plan: Plan) -> list[str]:
    request, model, time = plan.request, plan.model, plan.time
    parameters = f"{format_count(model.parameters)} parameters"
    if model.trainable_parameters != model.parameters:
        adapter = f": LoRA {request.lora}" if request.lora is not None else ""
        base = f"; base in {request.quantize}" if request.quantize is not None else ""
        parameters += f" ({format_count(model.trainable_parameters)} trainable{adapter}{base})"
    clipping = f", gradient norm at most {request.gradient_clipping:g}" if request.gradient_clipping else ""
    rate = request.learning_rate_in_words
    packed = ", packed with documents" if request.pack else ""
    states = ", master weights and optimizer states in bf16" if request.optimizer.states == "bf16" else ""
    shares = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in time.parts.items() if seconds)
    return _rows(
        model=f"{request.model}, {model.task}, {parameters}, samples of {request.seq_len} tokens{packed}",
        cluster=_cluster(plan),
        strategy=str(plan.strategy),
        numbers=f"{request.precision}, gradients summed in {plan.strategy.gradient_accumulation_dtype}{states}",
        optimizer=f"{_optimizer(request)}, learning rate {rate}, {_numbers(request)}{clipping}",
        step=f"{format_seconds(time.total_seconds)} estimated: {shares}",
    )


def _rows(**texts: str) -> list[str]:
    return [f"{name:<10} {text}" for name, text in texts.items()]


def _data(plan: Plan) -> list[str]:
    """Describe what the plan knows of the data, and a typical global batch of it."""
    grouping, batch = plan.grouping, plan.batch
    if grouping is None:
        return []
    source = f" ({grouping.source})" if grouping.source else ""
    most = max(batch.micro_batch)
    largest = most * plan.request.seq_len // (batch.shortest or plan.request.seq_len)
    return _rows(
        data=f"{grouping.num_samples:,} samples{source}, {format_count(grouping.num_tokens)} tokens: half have up to "
        f"{grouping.median}, 99 % up to {grouping.percentile_99}, the longest has {grouping.longest}",
        typical=f"{plural(grouping.step_samples, 'sample')} are {grouping.step_tokens:,} tokens in "
        f"{plural(grouping.micro_steps, 'micro-step')}, with up to {plural(largest, 'sample')} in one micro-batch",
        padding=f"{100 * grouping.padding:.0f} % of the tokens; micro-batches of {plural(most, 'sample')} in random "
        f"order would have {100 * grouping.fixed_padding:.0f} %",
    )


def _optimizer(request: Request) -> str:
    momentum = f" with momentum {request.optimizer.momentum:g}" if request.optimizer.momentum else ""
    implementation = f" ({request.optimizer.implementation})" if request.optimizer.implementation else ""
    return f"{request.optimizer.name}{implementation}{momentum}"


def _numbers(request: Request) -> str:
    decay = f"weight decay {request.weight_decay:g}" + ("" if request.decays_all else " but of norms and biases")
    if request.optimizer.name == "sgd":
        return decay
    optimizer = request.optimizer
    return f"betas {optimizer.beta1:g} and {optimizer.beta2:g}, epsilon {optimizer.epsilon:g}, {decay}"


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


def _list(title: str, lines: Iterable[str]) -> list[str]:
    texts = [f"  {line}" for line in lines]
    return [title, *texts] if texts else []


HEAD = ("step", "", "batch", "peak", "headroom", "")


def strategy_table(plan: Plan, *, shown: int | None = None) -> Table:
    """Return the chosen strategy and the others, fastest first; at most `shown` of these.

    A batch is micro-batch x accumulation steps.
    """
    rejected = plan.rejected if shown is None else plan.rejected[:shown]
    rest = len(plan.rejected) - len(rejected)
    notes = ["> lower bound, < upper bound: pruned, not fully evaluated"] * any(each.is_bound for each in rejected)
    notes += [f"{rest} more: `frugal explain`"] * (rest > 0)
    memory, total = plan.memory, plan.time.total_seconds
    chosen = (
        format_seconds(total),
        "1.00x",
        f"{plan.batch.largest_micro_batch} x {plan.batch.accumulation_steps}",
        format_bytes(memory.total_bytes),
        format_bytes(memory.headroom_bytes),
        f"{brief_name(plan.strategy)}: chosen",
    )
    return Table(
        title="strategies",
        rows=(HEAD, chosen, *(_row(plan.time, each) for each in rejected)),
        note="; ".join([*notes, MODES_NOTE]),
        has_head=True,
        width=WIDE,
    )


def _row(chosen: StepTime, rejected: Rejected) -> tuple[str, ...]:
    lower, upper = (">", "<") if rejected.is_bound else ("", "")
    seconds, headroom = rejected.step_seconds, rejected.headroom_bytes
    step, ratio = "-", ""
    if seconds is not None and (headroom is None or headroom >= 0):
        step = f"{lower}{format_seconds(seconds)}"
        ratio = f"{seconds / chosen.total_seconds:.2f}x" if chosen.total_seconds else ""
    steps = f" x {rejected.accumulation_steps}" if rejected.accumulation_steps else ""
    return (
        step,
        ratio,
        f"{rejected.micro_batch}{steps}",
        f"{lower}{format_bytes(rejected.peak_bytes)}" if rejected.peak_bytes is not None else "",
        f"{upper}{format_bytes(headroom)}" if headroom is not None else "",
        f"{brief_name(rejected.strategy)}: {_verdict(chosen, rejected)}",
    )


def _verdict(chosen: StepTime, rejected: Rejected) -> str:
    """Return the reason in few words: of a slower strategy the part of the step that is longer."""
    if rejected.reason.startswith("cannot fit"):
        return "cannot fit"
    if rejected.time is None or not rejected.reason.startswith(("slower", "cannot be faster")):
        return rejected.reason
    parts = {name: seconds - chosen.parts[name] for name, seconds in rejected.time.parts.items()}
    longest = max(parts, key=lambda name: parts[name])
    return f"{longest} +{format_seconds(parts[longest])}" if parts[longest] > 0 else rejected.reason


def explanation(plan: Plan, *, in_full: bool = False) -> list[Block]:
    """Return what binds, why, and all strategies that were evaluated; `in_full`: the rest of the plan, too."""
    reasoned: list[Block] = [
        binding(plan),
        ["why", *(f"  {sentence}" for sentence in plan.why[:-1])],
        strategy_table(plan),
    ]
    if not in_full:
        return [[plan.arithmetic, f"{plan.strategy}: {format_seconds(plan.time.total_seconds)} a step"], *reasoned]
    headline, facts, breakdown, _, notes, _, defaults, assumed = summary_blocks(plan)
    return [headline, facts, breakdown, *reasoned, notes, defaults, assumed]
