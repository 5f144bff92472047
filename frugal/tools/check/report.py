"""The text report of a check."""

from collections.abc import Sequence

from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.tools.check.checked import Check
from frugal.tools.check.document import NAMES
from frugal.tools.check.settings import Finding
from frugal.tools.check.verdict import Verdict
from frugal.units import format_bytes, plural

SHOWN_BYTES = 1 << 16
SHOWN_ASKERS = 3
USUAL_CONTEXT_BYTES = 500 << 20
"""The approximate difference between real and planned CUDA contexts (docs/facts/cuda.md)."""


def report(check: Check) -> str:
    """Return the whole check as text, the verdict first."""
    blocks = [
        [headline(check), *_what(check)],
        _out_of_memory(check) if check.out_of_memory is not None else [],
        ["batch", *_batch(check)],
        _memory(check.verdict) if check.verdict is not None else [],
        _listed("traps", [line for finding in check.findings for line in finding_lines(finding)]),
        _listed("evaluated differently than written", list(deviations(check))),
        _listed("read", _read(check)),
        _listed("unknown to frugal, and ignored", [f"{place}: {place.key}" for place in check.settings.unknown]),
        _change(check),
        _plan(check),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def headline(check: Check) -> str:
    """Return the verdict in one line."""
    verdict = check.verdict
    stops = [finding for finding in check.findings if finding.level == "error"]
    if verdict is None:
        why = "; ".join(refusal.text for refusal in check.settings.refusals)
        return f"not checked: {why}"
    memory = verdict.memory
    device = memory.device_in(check.cluster)
    of = f"{format_bytes(memory.total_bytes)} of {format_bytes(device.memory_bytes)}"
    if not verdict.fits:
        missing, where = _missing(verdict)
        text = f"does not fit: {format_bytes(missing)} short{where}: {of}"
    else:
        text = f"fits: {of}, {format_bytes(memory.headroom_bytes)} of headroom"
    return f"{text}; {plural(len(stops), 'error')} below" if stops else text


def _missing(verdict: Verdict) -> tuple[int, str]:
    if verdict.host_shortfall_bytes:
        return verdict.host_shortfall_bytes, " of a node's host memory"
    if verdict.disk_shortfall_bytes:
        return verdict.disk_shortfall_bytes, " of a node's disk"
    return -verdict.memory.headroom_bytes, ""


def _what(check: Check) -> list[str]:
    files = ", ".join(f"{document.path} ({NAMES[document.tool]})" for document in check.documents)
    lines = [f"  of {files}"]
    gpus = plural(check.cluster.world_size, check.cluster.rank_noun)
    device = check.cluster.devices[0].name
    if check.verdict is not None:
        request = check.verdict.subject.request
        lora = f", LoRA {request.lora}" if request.lora is not None else ""
        assumed = " (assumed: no file gives their length, see --seq-len)" if check.seq_len_is_assumed else ""
        lines += [
            f"  {request.model} in {request.precision}{lora}, samples of {request.seq_len} tokens{assumed}",
            f"  {check.verdict.subject.strategy}",
        ]
    return [*lines, f"  on {gpus}: {device}"]


def _batch(check: Check) -> list[str]:
    filled = check.deepspeed.filled if check.deepspeed is not None else ()
    lines = [f"  {check.arithmetic}"]
    for each in filled:
        lines.append(f"  {each.name}: auto is {each.value}, {f'by {each.by}' if each.by else 'which is the default'}")
    return lines


def _out_of_memory(check: Check) -> list[str]:
    """Compare torch's message with the dry run."""
    message = check.out_of_memory
    assert message is not None
    who = [f"rank {message.rank}"] if message.rank is not None else []
    who += [f"GPU {message.gpu}"] if message.gpu is not None else []
    sizes = {
        "allocated": message.allocated_bytes,
        "reserved besides": message.unallocated_bytes,
        "free": message.free_bytes,
        "in all": message.total_bytes,
    }
    said = ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items() if size is not None)
    where = f" in {message.phase}" if message.phase else ""
    more = f"; {message.num_ranks} ranks have such a message" if message.num_ranks > 1 else ""
    return [
        f"out of memory, {message.place}: {', '.join(who)}",
        f"  {format_bytes(message.requested_bytes)} were requested from the driver{where}: {said}{more}",
        *(f"  {line}" for line in out_of_memory_lines(check)),
    ]


def out_of_memory_lines(check: Check) -> list[str]:
    """Return the dry run's requests of the message's size, and what they suggest."""
    message, verdict = check.out_of_memory, check.verdict
    assert message is not None
    if verdict is None:
        return []
    live = verdict.memory.live_bytes
    lines = [f"the dry run of these settings has {format_bytes(live)} of live tensors at its peak"]
    if not check.askers:
        lines.append(
            "nothing in it requests that many bytes: other settings, longer samples or another model ran; or it was "
            "loading, evaluating or saving"
        )
    for asked in check.askers[:SHOWN_ASKERS]:
        operator = asked.operator.removeprefix("aten.").removesuffix(".default")
        module = f" of {asked.module}" if asked.module else ""
        lines.append(f"{operator}{module} in {asked.phase} requests that, with {format_bytes(asked.live_bytes)} alive")
    pieces, others = message.unallocated_bytes or 0, message.others_bytes or 0
    if pieces >= message.requested_bytes:
        lines.append(
            f"{format_bytes(pieces)} that torch had reserved were free, but fragmented: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    if others > verdict.memory.context + USUAL_CONTEXT_BYTES:
        lines.append(
            f"{format_bytes(others)} of the card were neither torch's nor free: other processes, or a large context"
        )
    return lines


def _memory(verdict: Verdict) -> list[str]:
    memory = verdict.memory
    operator = memory.operator.removeprefix("aten.").removesuffix(".default")
    lines = [f"memory of the fullest GPU at its peak, in {memory.phase}{f' ({operator})' if operator else ''}"]
    rows = {name: size for name, size in categories(memory).items() if size >= SHOWN_BYTES}
    rows |= {"total": memory.total_bytes, "may be used": memory.usable_bytes + memory.context}
    if verdict.subject.strategy.offload_optimizer != "none":
        rows["host, a node"] = memory.host_bytes_per_node
    return [*lines, *(f"  {name:<14} {format_bytes(size):>12}" for name, size in rows.items())]


def categories(memory: MemoryBreakdown) -> dict[str, int]:
    """Return the bytes by category, slack and context included."""
    return {name: getattr(memory, name) for name in memory.CATEGORIES}


def finding_lines(finding: Finding) -> list[str]:
    """Return a trap, its place and its remedy."""
    where = f"{finding.place}: " if finding.place is not None else ""
    lines = [f"{finding.level}: {where}{finding.text}  [{finding.rule}]"]
    return [*lines, f"  {finding.hint}"] if finding.hint else lines


def deviations(check: Check) -> Sequence[str]:
    """Return what is evaluated differently than written; refusals come first."""
    both = (*check.settings.refusals, *check.settings.deviations)
    lines = [f"{each.place}: {each.text}" if each.place is not None else each.text for each in both]
    return [*lines, *(check.verdict.notes if check.verdict is not None else ())]


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)] if lines else []


def _read(check: Check) -> list[str]:
    """Return the fields whose values were read, a line for each file."""
    files = dict.fromkeys(place.path for place in check.settings.read)
    return [f"{path}: {', '.join(each.key for each in check.settings.read if each.path == path)}" for path in files]


def _change(check: Check) -> list[str]:
    if check.verdict is None or check.verdict.fits:
        return []
    if check.change is None:
        return ["smallest change that fits", "  none that keeps the batch and what is trained"]
    change = check.change
    assert change.verdict is not None
    memory = change.verdict.memory
    lines = [f"  {name}: {_written(value)}" for name, value in change.fields.items()]
    room = f"{format_bytes(memory.total_bytes)}, {format_bytes(memory.headroom_bytes)} of headroom"
    return [f"smallest change that fits: {change.words}", *lines, f"  it then takes {room}"]


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plan(check: Check) -> list[str]:
    if check.plan is not None:
        return ["what frugal would do with the same batch", *(f"  {line}" for line in str(check.plan).splitlines())]
    return ["frugal has no plan for it", *(f"  {line}" for line in check.no_plan.splitlines())] if check.no_plan else []
