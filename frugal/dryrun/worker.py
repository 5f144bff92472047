"""`python -m frugal.dryrun.worker`: a process that dry-runs on request, until its input ends.

One JSON object a line comes in, one goes out. A process of its own, because a dry run gives DeepSpeed a pretended
device, and the caller may train for real afterwards.
"""

import functools
import os
import sys
import traceback
from typing import Any, BinaryIO

import msgspec

from frugal.config.hardware.cluster import KERNEL_CLASSES
from frugal.config.request import Request
from frugal.distributed import parent
from frugal.dryrun.messages import (
    Answer,
    AskCheck,
    AskDryRun,
    AskFacts,
    AskFused,
    AskTrace,
    Mistake,
    Question,
    Traced,
    WarmUp,
)
from frugal.imports import collected_seldom


def main() -> None:
    """Answer every question on standard input."""
    parent.end_with_parent()
    answers = _protect_stdout()
    with collected_seldom():  # a dry run itself says when to collect
        import frugal.dryrun.trace.trace  # noqa: F401 - takes seconds, in which the first question is still on its way

        for line in sys.stdin.buffer:
            answers.write(msgspec.json.encode(_answer(line)) + b"\n")
            answers.flush()
    answers.close()
    os._exit(0)  # a second of taking torch apart is saved


def _protect_stdout() -> BinaryIO:
    """Return a private copy of standard output; output of libraries goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _answer(line: bytes) -> Answer:
    from frugal.errors import FrugalError

    try:
        question: Question = msgspec.json.decode(line, type=Question)
        match question:
            case AskFacts():
                return Answer(describe=_describe(question))
            case AskCheck():
                return Answer(notes=_check(question))
            case AskFused():
                return Answer(fused=_fused(question))
            case AskTrace():
                return Answer(traced=_trace(question))
            case AskDryRun():
                return Answer(dry_run=_run(question))
            case WarmUp():
                import frugal.dryrun.run  # noqa: F401 - DeepSpeed takes seconds

                return Answer()
    except FrugalError as error:
        return Answer(mistake=_mistake(error))
    except Exception as error:
        from frugal.dryrun.run import failure_in_forward

        mistake = None if isinstance(question, WarmUp) else failure_in_forward(question.request.model, error)
        return Answer(crash=traceback.format_exc()) if mistake is None else Answer(mistake=_mistake(mistake))


def _mistake(error: Any) -> Mistake:
    return Mistake(kind=type(error).__name__, what=error.what, because=error.because, hint=error.hint)


@functools.lru_cache(maxsize=2)
def _spec_of(model: Request) -> Any:
    from frugal.models.loading import bitsandbytes_internals
    from frugal.models.resolve import resolve_request

    if model.lora is not None:
        bitsandbytes_internals.import_uncompiled()
    return resolve_request(model)


def _model_of(request: Request) -> Request:
    """Return a request with only the fields that define the model."""
    return Request(
        model=request.model, task=request.task, lora=request.lora, quantize=request.quantize,
        precision=request.precision,
    )  # fmt: skip


def _spec(request: Request) -> Any:
    return _spec_of(_model_of(request))


def _resolved(question: AskDryRun | AskTrace) -> Any:
    from frugal.models.spec import check_sequence_length

    spec = _spec(question.request)
    check_sequence_length(spec, question.request.seq_len)
    return spec


def _describe(question: AskFacts) -> Any:
    import torch

    from frugal.dryrun.loading import reading
    from frugal.models import activation_checkpointing, tiled_loss
    from frugal.models.loading import quantised
    from frugal.planning.model_facts import ModelFacts, Weights

    spec = _spec(question.request)  # whatever the length asked for
    model = spec.build(dtype=torch.bfloat16, device="meta")
    parameters = list(model.parameters())
    return ModelFacts(
        task=spec.task,
        max_positions=spec.max_positions,
        parameters=sum(map(quantised.elements, parameters)),
        trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        trainable_sizes=tuple(parameter.numel() for parameter in parameters if parameter.requires_grad),
        largest_parameter=max(map(quantised.elements, parameters), default=0),
        can_recompute=activation_checkpointing.is_supported(model),
        can_tile=spec.task in ("causal-lm", "masked-lm", "seq2seq") and tiled_loss.is_supported(model),
        weights=Weights(origin=spec.origin, reading=reading(spec)),
        packed=quantised.packed(model),
    )


def _check(question: AskCheck) -> tuple[str, ...]:
    from frugal.models.trials import model_check, text_checks

    spec = _spec(question.request)
    if question.request.pack:
        text_checks.check_packing(spec)
    if (shared_by := question.request.sequence_parallel or 1) > 1:
        text_checks.check_sequence_parallel(spec, shared_by, pack=bool(question.request.pack))
    has_low_stage = question.request.zero_stage in (0, 1)
    return model_check.check_model(spec, question.request.batch_norm, has_low_stage=has_low_stage)


def _fused(question: AskFused) -> tuple[str, ...]:
    from frugal.models.fused import replacement

    model, _ = _built(_model_of(question.request))
    return replacement.names(model)


@functools.lru_cache(maxsize=1)
def _built(model: Request) -> Any:
    """Return the model on meta, cached: building a large one takes longer than its trace.

    Raises:
        RequestError: no ZeRO stage can train it.
    """
    from frugal.deepspeed_adapter import refusals
    from frugal.deepspeed_adapter.kernels import DTYPES
    from frugal.dryrun.trace.trace import built

    made = built(lambda: _spec_of(model).build(dtype=DTYPES[model.precision], device="meta"))
    refusals.refuse(made[0], 0)
    return made


def _objective(spec: Any, request: Request) -> Any:
    return spec.objective(pack=bool(request.pack), document_tokens=request.document_tokens)


def _trace(question: AskTrace) -> Traced:
    from frugal.dryrun.trace.trace import trace
    from frugal.planning.memory.timeline import NotAffineError

    spec = _resolved(question)
    alike = set(KERNEL_CLASSES)
    model, building_bytes = _built(_model_of(question.request))
    objective = _objective(spec, question.request)
    try:
        traced = trace(model, objective, question, building_bytes=building_bytes, alike=alike)
    except NotAffineError:
        traced = None
    return Traced(trace=traced, alike=tuple(sorted(alike | {question.capability})))


def _run(question: AskDryRun) -> Any:
    from frugal.deepspeed_adapter import contract

    contract.verify()  # before modules are imported that use names that may be missing
    from frugal.deepspeed_adapter.kernels import DTYPES
    from frugal.dryrun.run import dry_run

    spec = _resolved(question)
    dtype = DTYPES[question.request.precision]
    return dry_run(lambda: spec.build(dtype=dtype, device="meta"), _objective(spec, question.request), question)


if __name__ == "__main__":
    main()
