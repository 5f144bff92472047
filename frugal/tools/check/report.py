"""A check as text; as JSON; and as SARIF 2.1.0, which code hosts show beside the lines.

SARIF: https://docs.oasis-open.org/sarif/sarif/v2.1.0/. A result is a trap, an unknown field, a deviation, or the
verdict where it is not that it fits; its rule is the trap's name.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from frugal.config.hardware import local_host
from frugal.errors import FrugalError
from frugal.planning.report import select_texts
from frugal.tools.check.checked import Check
from frugal.tools.check.document import NAMES, Deviation, Place
from frugal.tools.check.out_of_memory import OutOfMemoryMessage
from frugal.tools.check.verdict import Verdict
from frugal.units import format_bytes, plural

SHOWN_BYTES = 1 << 16
SHOWN_ASKERS = 3
USUAL_CONTEXT_BYTES = 500 << 20
"""The approximate difference between real and planned CUDA contexts (docs/facts/cuda.md)."""

SCHEMA = 1
SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def report(check: Check) -> str:
    """Return the whole check as text, the verdict first."""
    settings, verdict, change = check.settings, check.verdict, check.change
    files = ", ".join(f"{document.path} ({NAMES[document.tool]})" for document in check.documents)
    opening = [f"of {files}"]
    if verdict is not None:
        request = verdict.subject.request
        lora = f", LoRA {request.lora}" if request.lora is not None else ""
        assumed = " (assumed: no file gives their length, see --seq-len)" if settings.seq_len is None else ""
        opening += [
            f"{request.model} in {request.precision}{lora}, samples of {request.seq_len} tokens{assumed}",
            str(verdict.subject.strategy).replace("ZeRO-0", "ZeRO-0" if check.deepspeed else "without DeepSpeed"),
        ]
    gpus = plural(check.cluster.world_size, check.cluster.rank_noun)
    blocks = {headline(check): [*opening, f"on {gpus}: {check.cluster.devices[0].name}"]}
    if check.out_of_memory is not None:
        title, said = _message(check.out_of_memory)
        blocks[title] = [said, *out_of_memory_lines(check)]
    blocks["batch"] = [str(check.arithmetic)] + [
        f"{each.name}: auto is {each.value}, {f'by {each.by}' if each.by else 'which is the default'}"
        for each in (check.deepspeed.filled if check.deepspeed is not None else ())
    ]
    if verdict is not None:
        memory = verdict.memory
        operator = _short(memory.operator)
        rows = {name: getattr(memory, name) for name in memory.CATEGORIES if getattr(memory, name) >= SHOWN_BYTES}
        rows |= {"total": memory.total_bytes, "may be used": memory.usable_bytes + memory.context}
        if verdict.subject.strategy.offload_optimizer != "none":
            rows["host, a node"] = memory.host_bytes_per_node
        title = f"memory of the fullest GPU at its peak, in {memory.phase}{f' ({operator})' if operator else ''}"
        blocks[title] = [f"{name:<14} {format_bytes(size):>12}" for name, size in rows.items()]
    blocks["traps"] = [
        f"{each.level}: {f'{each.place}: ' if each.place is not None else ''}{each.text}  [{each.rule}]"
        + (f"\n    {each.hint}" if each.hint else "")
        for each in check.findings
    ]
    blocks |= {
        title: [f"{each.place}: {each.text}" if each.place is not None else each.text for each in rows]
        for title, rows in (
            ("not checked because of", settings.refusals),
            (
                "evaluated differently than written",
                [*settings.deviations, *map(Deviation, verdict.notes if verdict is not None else ())],
            ),
        )
    }
    blocks["read"] = [
        f"{path}: {', '.join(each.key for each in settings.read if each.path == path)}"
        for path in dict.fromkeys(place.path for place in settings.read)
    ]
    blocks["unknown to frugal"] = [f"{place}: {place.key}" for place in settings.unknown]
    if change is not None:
        after = change.verdict.memory
        blocks[f"smallest change that fits: {change.words}"] = [
            *(
                f"{name}: {str(value).lower() if isinstance(value, bool) else value}"
                for name, value in change.fields.items()
            ),
            f"it then takes {format_bytes(after.total_bytes)}, {format_bytes(after.headroom_bytes)} of headroom",
        ]
    elif verdict is not None and not verdict.fits:
        blocks["smallest change that fits"] = ["none that keeps the batch and what is trained"]
    blocks["what frugal would do with the same batch"] = str(check.plan).splitlines() if check.plan is not None else []
    blocks["frugal has no plan for it"] = check.no_plan.splitlines()
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in blocks.items() if lines)


def _message(message: OutOfMemoryMessage) -> tuple[str, str]:
    """Return where torch's message stands, and what it says."""
    sizes = {
        "allocated": message.allocated_bytes,
        "reserved besides": message.unallocated_bytes,
        "free": message.free_bytes,
        "in all": message.total_bytes,
    }
    said = ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items() if size is not None)
    numbers = {"rank": message.rank, "GPU": message.gpu}
    who = ", ".join(f"{name} {number}" for name, number in numbers.items() if number is not None)
    where = f" in {message.phase}" if message.phase else ""
    more = f"; {message.num_ranks} ranks have such a message" if message.num_ranks > 1 else ""
    requested = f"{format_bytes(message.requested_bytes)} were requested from the driver{where}"
    return f"out of memory, {message.place}: {who}", f"{requested}: {said}{more}"


def _short(operator: str) -> str:
    return operator.removeprefix("aten.").removesuffix(".default")


def headline(check: Check) -> str:
    """Return the verdict in one line."""
    verdict = check.verdict
    if verdict is None:
        return f"not checked: {'; '.join(refusal.text for refusal in check.settings.refusals)}"
    memory = verdict.memory
    of = f"{format_bytes(memory.total_bytes)} of {format_bytes(memory.device_in(check.cluster).memory_bytes)}"
    if verdict.fits:
        text = f"fits: {of}, {format_bytes(memory.headroom_bytes)} of headroom"
    else:
        shortfalls = {
            " of a node's host memory": verdict.host_shortfall_bytes, " of a node's disk": verdict.disk_shortfall_bytes,
            "": -memory.headroom_bytes,
        }  # fmt: skip
        where, missing = next((where, missing) for where, missing in shortfalls.items() if missing > 0)
        text = f"does not fit: {format_bytes(missing)} short{where}: {of}"
    num_errors = sum(finding.level == "error" for finding in check.findings)
    return f"{text}; {plural(num_errors, 'error')} below" if num_errors else text


def out_of_memory_lines(check: Check) -> list[str]:
    """Return the dry run's requests of the message's size, and what they suggest."""
    message, verdict = check.out_of_memory, check.verdict
    if message is None or verdict is None:
        return []
    live = verdict.memory.live_bytes
    pieces, others = message.unallocated_bytes or 0, message.others_bytes or 0
    return select_texts(
        (True, f"the dry run of these settings has {format_bytes(live)} of live tensors at its peak"),
        (
            not check.askers,
            "nothing in it requests that many bytes: other settings, longer samples or another model ran; or it was "
            "loading, evaluating or saving",
        ),
        *(
            (True, f"{_short(asked.operator)}{f' of {asked.module}' if asked.module else ''} in {asked.phase} "
             f"requests that, with {format_bytes(asked.live_bytes)} alive")
            for asked in check.askers[:SHOWN_ASKERS]
        ),
        (
            pieces >= message.requested_bytes,
            f"{format_bytes(pieces)} that torch had reserved were free, but fragmented: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        (
            others > verdict.memory.context + USUAL_CONTEXT_BYTES,
            f"{format_bytes(others)} of the card were neither torch's nor free: other processes, or a large context",
        ),
    )  # fmt: skip


def as_json(check: Check) -> bytes:
    """Return the whole check as JSON. Sizes are bytes; `exit_code` is the command's.

    Keys: `verdict` (`fits`, `does not fit`, `not checked`), `files`, `batch`, `auto`, `subject`, `memory`, `findings`,
    `deviations`, `refusals`, `read`, `unknown`, `out_of_memory`, `change`, `plan`, `no_plan`.
    """
    verdict, change, arithmetic, settings = check.verdict, check.change, check.arithmetic, check.settings
    subject = None
    if verdict is not None:
        request = verdict.subject.request
        subject = {
            "model": request.model,
            "precision": request.precision,
            "seq_len": request.seq_len,
            "optimizer": request.optimizer.name,
            "lora": None if request.lora is None else str(request.lora),
            "strategy": verdict.subject.strategy,
        }
    message = {"text": out_of_memory_lines(check), "askers": check.askers}
    return _encoded({
        "schema": SCHEMA,
        "verdict": "not checked" if verdict is None else "fits" if verdict.fits else "does not fit",
        "exit_code": check.exit_code,
        "files": [{"path": str(each.path), "tool": each.tool} for each in check.documents],
        "batch": {
            "global_batch": arithmetic.global_batch,
            "world_size": arithmetic.world_size,
            "micro_batch": arithmetic.micro_batch,
            "accumulation_steps": arithmetic.accumulation_steps,
            "sequence_parallel": arithmetic.shared_by,
        },
        "auto": check.deepspeed.filled if check.deepspeed is not None else (),
        "subject": subject,
        "memory": None if verdict is None else _memory(verdict),
        "findings": [_placed(each) for each in check.findings],
        "deviations": [_placed(each) for each in settings.deviations],
        "refusals": [_placed(each) for each in settings.refusals],
        "read": [_at(place) for place in settings.read],
        "unknown": [_at(place) for place in settings.unknown],
        "out_of_memory": None if check.out_of_memory is None else _placed(check.out_of_memory) | message,
        "change": None if change is None else {
            "text": change.words, "fields": dict(change.fields), "memory": _memory(change.verdict),
        },
        "plan": None if check.plan is None else msgspec.Raw(check.plan.to_json()),
        "no_plan": check.no_plan or None,
    })  # fmt: skip


def _memory(verdict: Verdict) -> dict[str, Any]:
    memory = verdict.memory
    names = ("total_bytes", "usable_bytes", "headroom_bytes", "host_bytes_per_node", "phase", "operator")
    shortfalls = {name: getattr(verdict, name) for name in ("host_shortfall_bytes", "disk_shortfall_bytes")}
    return {name: getattr(memory, name) for name in (*memory.CATEGORIES, *names)} | shortfalls


def _placed(each: Any) -> dict[str, Any]:
    """Return the fields of something that has a place, and the place."""
    return {name: value for name, value in vars(each).items() if name != "place"} | _at(each.place)


def _at(place: Place | None) -> dict[str, Any]:
    if place is None:
        return {"file": None, "line": None, "key": None}
    return {"file": str(place.path), "line": place.line, "key": place.key}


def error_as_json(error: FrugalError) -> bytes:
    """Return an error that ended the check as JSON, with the keys `verdict` and `exit_code` of a check."""
    return _encoded({
        "schema": SCHEMA, "verdict": "error", "exit_code": error.exit_code, "error": error.what,
        "because": error.because, "hint": error.hint,
    })  # fmt: skip


def as_sarif(check: Check) -> bytes:
    """Return the check as a SARIF log with one run."""
    first = Place(check.documents[0].path, "")
    rule = "not-checked" if check.verdict is None else "" if check.verdict.fits else "does-not-fit"
    change = f"; it would fit: {check.change.words}" if check.change is not None else ""
    rows: list[tuple[str, str, str, Place | None]] = [
        (rule, "error", headline(check) + change, None),
        *((each.rule, each.level, ": ".join(filter(None, (each.text, each.hint))), each.place)
          for each in check.findings),
        *(("evaluated-otherwise", "note", each.text, each.place) for each in check.settings.deviations),
        *(("unknown-field", "note", f"`{place.key}` is unknown to frugal", place)
          for place in check.settings.unknown),
    ]  # fmt: skip
    results = [_result(rule, level, text, place or first) for rule, level, text, place in rows if rule]
    return _sarif(results, {document.path: NAMES[document.tool] for document in check.documents})


def error_as_sarif(error: FrugalError, path: Path) -> bytes:
    """Return an error that ended the check of a file as a SARIF log with one result."""
    return _sarif([_result("error", "error", str(error), Place(path, ""))], {})


def _sarif(results: Sequence[Mapping[str, Any]], kinds: Mapping[Path, str]) -> bytes:
    rules = [{"id": rule} for rule in sorted({result["ruleId"] for result in results})]
    driver = {"name": "frugal check", "version": local_host.versions()["frugal"], "rules": rules}
    run = {
        "tool": {"driver": driver},
        "artifacts": [{"location": _location(path), "description": {"text": kind}} for path, kind in kinds.items()],
        "results": results,
        "columnKind": "unicodeCodePoints",
    }
    return _encoded({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]})


def _result(rule: str, level: str, text: str, place: Place) -> dict[str, Any]:
    region = {} if place.line is None else {"region": {"startLine": place.line}}
    physical = {"artifactLocation": _location(place.path), **region}
    return {"ruleId": rule, "level": level, "message": {"text": text}, "locations": [{"physicalLocation": physical}]}


def _location(path: Path) -> dict[str, str]:
    """Return a SARIF location. Relative paths stay relative: code hosts resolve them in the repository."""
    return {"uri": path.as_uri() if path.is_absolute() else quote(path.as_posix())}


def _encoded(content: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=2)
