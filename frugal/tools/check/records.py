"""A check in machine-readable form: JSON, and SARIF 2.1.0, which code hosts show beside the lines.

SARIF: https://docs.oasis-open.org/sarif/sarif/v2.1.0/. A result is a trap, an unknown field, a deviation, or the
verdict where it is not that it fits; its rule is the trap's name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from frugal.config.hardware import local_host
from frugal.errors import FrugalError
from frugal.tools.check.checked import Check
from frugal.tools.check.document import NAMES, Place
from frugal.tools.check.report import categories, headline, out_of_memory_lines
from frugal.tools.check.settings import Finding
from frugal.tools.check.verdict import Subject, Verdict

SCHEMA = 1
SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def as_json(check: Check) -> bytes:
    """Return the whole check as JSON. Sizes are bytes; `exit_code` is the command's.

    Keys: `verdict` (`fits`, `does not fit`, `not checked`), `files`, `batch`, `auto`, `subject`, `memory`, `findings`,
    `deviations`, `refusals`, `read`, `unknown`, `out_of_memory`, `change`, `plan`, `no_plan`.
    """
    verdict = check.verdict
    content = {
        "schema": SCHEMA,
        "verdict": "not checked" if verdict is None else "fits" if verdict.fits else "does not fit",
        "exit_code": check.exit_code,
        "files": [{"path": str(each.path), "tool": each.tool} for each in check.documents],
        "batch": {
            "global_batch": check.arithmetic.global_batch,
            "world_size": check.arithmetic.world_size,
            "micro_batch": check.arithmetic.micro_batch,
            "accumulation_steps": check.arithmetic.accumulation_steps,
            "sequence_parallel": check.arithmetic.shared_by,
        },
        "auto": [
            {"name": each.name, "value": each.value, "by": each.by}
            for each in (check.deepspeed.filled if check.deepspeed is not None else ())
        ],
        "subject": None if verdict is None else _subject(verdict.subject),
        "memory": None if verdict is None else _memory(verdict),
        "findings": [_finding(finding) for finding in check.findings],
        "deviations": [{"text": each.text, **_at(each.place)} for each in check.settings.deviations],
        "refusals": [{"text": each.text, **_at(each.place)} for each in check.settings.refusals],
        "read": [_at(place) for place in check.settings.read],
        "unknown": [_at(place) for place in check.settings.unknown],
        "out_of_memory": _out_of_memory(check),
        "change": _change(check),
        "plan": None if check.plan is None else msgspec.json.decode(check.plan.to_json()),
        "no_plan": check.no_plan or None,
    }
    return _written(content)


def _subject(subject: Subject) -> dict[str, Any]:
    request = subject.request
    return {
        "model": request.model,
        "precision": request.precision,
        "seq_len": request.seq_len,
        "optimizer": request.optimizer.name,
        "lora": None if request.lora is None else str(request.lora),
        "strategy": msgspec.to_builtins(subject.strategy),
    }


def _memory(verdict: Verdict) -> dict[str, Any]:
    memory = verdict.memory
    return {
        **categories(memory),
        "total_bytes": memory.total_bytes,
        "usable_bytes": memory.usable_bytes,
        "headroom_bytes": memory.headroom_bytes,
        "host_bytes_per_node": memory.host_bytes_per_node,
        "host_shortfall_bytes": verdict.host_shortfall_bytes,
        "disk_shortfall_bytes": verdict.disk_shortfall_bytes,
        "phase": memory.phase,
        "operator": memory.operator,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    text = {"rule": finding.rule, "level": finding.level, "text": finding.text, "hint": finding.hint or None}
    return text | _at(finding.place)


def _at(place: Place | None) -> dict[str, Any]:
    if place is None:
        return {"file": None, "line": None, "key": None}
    return {"file": str(place.path), "line": place.line, "key": place.key}


def _out_of_memory(check: Check) -> dict[str, Any] | None:
    message = check.out_of_memory
    if message is None:
        return None
    sizes = {name: value for name, value in asdict(message).items() if name != "place"}
    return {
        **sizes, **_at(message.place), "text": out_of_memory_lines(check),
        "askers": [msgspec.to_builtins(asked) for asked in check.askers],
    }  # fmt: skip


def _change(check: Check) -> dict[str, Any] | None:
    change = check.change
    if change is None or change.verdict is None:
        return None
    return {"text": change.words, "fields": dict(change.fields), "memory": _memory(change.verdict)}


def as_sarif(check: Check) -> bytes:
    """Return the check as a SARIF log with one run."""
    return _sarif(list(_results(check)), {document.path: NAMES[document.tool] for document in check.documents})


def error_as_json(error: FrugalError) -> bytes:
    """Return an error that ended the check as JSON, with the keys `verdict` and `exit_code` of a check."""
    content = {"schema": SCHEMA, "verdict": "error", "exit_code": error.exit_code, "error": error.what}
    return _written(content | {"because": error.because, "hint": error.hint})


def error_as_sarif(error: FrugalError, path: Path) -> bytes:
    """Return an error that ended the check of a file as a SARIF log with one result."""
    return _sarif([_result("error", "error", str(error), Place(path, ""))], {})


def _sarif(results: Sequence[Mapping[str, Any]], kinds: Mapping[Path, str]) -> bytes:
    rules = sorted({result["ruleId"] for result in results})
    run = {
        "tool": {
            "driver": {
                "name": "frugal check",
                "version": local_host.versions()["frugal"],
                "rules": [{"id": rule} for rule in rules],
            }
        },
        "artifacts": [{"location": _location(path), "description": {"text": kind}} for path, kind in kinds.items()],
        "results": results,
        "columnKind": "unicodeCodePoints",
    }
    return _written({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]})


def _written(content: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=2)


def _results(check: Check) -> Iterator[dict[str, Any]]:
    first = Place(check.documents[0].path, "")
    if check.verdict is None or not check.verdict.fits:
        rule = "not-checked" if check.verdict is None else "does-not-fit"
        change = f"; it would fit: {check.change.words}" if check.change is not None else ""
        yield _result(rule, "error", headline(check) + change, first)
    for finding in check.findings:
        hint = f": {finding.hint}" if finding.hint else ""
        yield _result(finding.rule, finding.level, finding.text + hint, finding.place or first)
    for deviation in check.settings.deviations:
        yield _result("evaluated-otherwise", "note", deviation.text, deviation.place or first)
    for place in check.settings.unknown:
        yield _result("unknown-field", "note", f"`{place.key}` is unknown to frugal, and ignored", place)


def _result(rule: str, level: str, text: str, place: Place) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": _location(place.path)}
    if place.line is not None:
        physical["region"] = {"startLine": place.line}
    return {"ruleId": rule, "level": level, "message": {"text": text}, "locations": [{"physicalLocation": physical}]}


def _location(path: Path) -> dict[str, str]:
    """Return a SARIF location. Relative paths stay relative: code hosts resolve them in the repository."""
    return {"uri": path.as_uri() if path.is_absolute() else quote(path.as_posix())}
