"""`python -m frugal.dryrun.worker`: a process that forks processes that dry-run on request, until its input ends.

Pickled questions come to these, pickled answers or errors go back. Processes of their own, because a dry run gives
DeepSpeed a pretended device, and the caller may train for real afterwards; forked, because imports take seconds.
"""

import functools
import gc
import inspect
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from signal import SIGKILL
from types import SimpleNamespace
from typing import Any

from frugal.config.request import Precision, Request
from frugal.distributed import parent
from frugal.dryrun.messages import (
    AskCheck,
    AskDryRun,
    AskFacts,
    AskFused,
    AskTrace,
    Question,
    Traced,
)
from frugal.dryrun.pool import WorkerError
from frugal.errors import FrugalError
from frugal.imports import collected_seldom, uncompiled
from frugal.required import put


def main() -> None:
    """Fork a process for each pair of descriptors that comes over standard input, and return their exit codes."""
    with collected_seldom():  # a dry run itself says when to collect
        for module in ("frugal.dryrun.trace.trace", "frugal.dryrun.run", "transformers.modeling_utils"):
            with suppress(Exception):  # a question that needs it answers with what is wrong
                import_module(module)
        # it reads a signature at each call of a function, one second in thirty of a dry run
        signatures = SimpleNamespace(signature=functools.cache(inspect.signature))
        put(import_module("torch.autograd.function"), "inspect", signatures)
        sys.path.append("")  # a user's own files are found, behind libraries
        gc.freeze()  # so that collections write to no memory that is shared
        control = socket.socket(fileno=0)
        while True:
            asked, descriptors, _, _ = socket.recv_fds(control, 16, 2)
            if not asked:  # the process that asks has ended, and workers end with this one
                os._exit(0)
            if not descriptors:
                answer = os.waitstatus_to_exitcode(os.waitpid(int(asked), 0)[1])
            elif not (answer := os.fork()):
                _serve(*descriptors)
            control.send(str(answer).encode())
            for each in descriptors:
                os.close(each)


def _serve(connection: int, stderr: int) -> None:
    """Answer every question that comes over `connection`."""
    for number, target in ((connection, 0), (stderr, 1), (stderr, 2)):  # output of libraries is an error, too
        os.dup2(number, target)
    parent.set_death_signal(SIGKILL)
    asking = Connection(0)
    with suppress(EOFError):
        while True:
            asking.send(_answer(asking.recv()))
    os._exit(0)  # a second of taking torch apart is saved


def _answer(question: Question) -> Any:
    """Return the answer to a question, or the error that it leads to."""
    try:
        return _ANSWERS[type(question)](question)
    except FrugalError as error:
        return error
    except Exception as error:
        from frugal.dryrun.run import failure_in_forward

        mistake = failure_in_forward(question.request.model, error)
        return mistake or WorkerError(f"the dry run crashed\n{traceback.format_exc()}")


@functools.lru_cache(maxsize=2)
def _spec_of(model: Request) -> Any:
    from frugal.models.resolve import resolve_request

    if model.lora is not None:
        with uncompiled(), suppress(ImportError):
            import bitsandbytes  # noqa: F401  # as peft does, which compiles its kernels in Python
    return resolve_request(model)


def _model_of(request: Request) -> Request:
    """Return a request with only the fields that define the model."""
    return Request(
        model=request.model, task=request.task, lora=request.lora, quantize=request.quantize,
        precision=request.precision,
    )  # fmt: skip


def _resolved(question: AskDryRun | AskTrace) -> tuple[Any, Any]:
    """Return the model's spec, and its objective as the request has it."""
    from frugal.models.spec import check_sequence_length

    spec, request = _spec_of(_model_of(question.request)), question.request
    check_sequence_length(spec, request.seq_len)
    return spec, spec.objective(pack=bool(request.pack), document_tokens=request.document_tokens)


def _describe(question: AskFacts) -> Any:
    from frugal.dryrun.loading import reading
    from frugal.models import activation_checkpointing, tiled_loss
    from frugal.models.loading import quantised
    from frugal.planning.model_facts import ModelFacts, Weights

    asked = _model_of(question.request)
    spec, (model, _) = _spec_of(asked), _built(asked, "bf16")  # whatever the length and the precision asked for
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
    from frugal.models.trials import model_check

    spec = _spec_of(_model_of(question.request))
    if question.request.pack:
        model_check.check_packing(spec)
    if (shared_by := question.request.sequence_parallel or 1) > 1:
        model_check.check_sequence_parallel(spec, shared_by, pack=bool(question.request.pack))
    has_low_stage = question.request.zero_stage in (0, 1)
    return model_check.check_model(spec, question.request.batch_norm, has_low_stage=has_low_stage)


def _fused(question: AskFused) -> tuple[str, ...]:
    from frugal.models.fused import replacement

    model, _ = _built(_model_of(question.request), question.request.precision)
    return replacement.names(model)


@functools.lru_cache(maxsize=1)
def _built(model: Request, precision: Precision) -> Any:
    """Return the model on meta in the type of `precision`, and the peak of its storages while it was built, in bytes.
    Cached: building a large one takes longer than its trace.

    Raises:
        RequestError: no ZeRO stage can train it.
    """
    from frugal.deepspeed_adapter import refusals
    from frugal.deepspeed_adapter.kernels import DTYPES
    from frugal.dryrun.trace.trace import built

    made = built(lambda: _spec_of(model).build(dtype=DTYPES[precision], device="meta"))
    refusals.refuse(made[0], 0)
    return made


def _trace(question: AskTrace) -> Traced:
    from frugal.dryrun.trace.trace import trace
    from frugal.planning.memory.timeline import NotAffineError

    _, objective = _resolved(question)
    model, building_bytes = _built(_model_of(question.request), question.request.precision)
    try:
        return Traced(trace(model, objective, question, building_bytes=building_bytes))
    except NotAffineError:
        return Traced(None)


def _run(question: AskDryRun) -> Any:
    from frugal.deepspeed_adapter import contract

    contract.verify()  # before modules are imported that use names that may be missing
    from frugal.deepspeed_adapter.kernels import DTYPES
    from frugal.dryrun.run import dry_run

    spec, objective = _resolved(question)
    return dry_run(lambda: spec.build(dtype=DTYPES[question.request.precision], device="meta"), objective, question)


_ANSWERS: dict[type[Question], Callable[[Any], Any]] = {
    AskFacts: _describe,
    AskCheck: _check,
    AskFused: _fused,
    AskTrace: _trace,
    AskDryRun: _run,
}


if __name__ == "__main__":
    main()
