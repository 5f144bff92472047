"""`python -m bench.gpu.worker cuda`: runs of `bench/gpu/truth.py`, one after another in one process.

One JSON object a line comes in, one goes out. Imports and the CUDA context are paid once. That is sound as long as
the allocator is empty between two runs; `clean` says whether it was, and whoever asks then starts another process.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import msgspec

from bench.gpu.configurations import Configuration, device
from frugal.engine.measure.record import ModelDefinition

WEIGHT = 0.01
EMULATED = "EMULATED_GPU_CARD"
"""In the environment of a process whose card is emulated: its name."""

LEFT_BYTES = 65_536  # that a run may leave behind, so that one small segment is the most it takes from the next


class Constants(msgspec.Struct, frozen=True, tag="constants"):
    """Measure what no configuration changes."""


class Run(msgspec.Struct, frozen=True, tag="run", kw_only=True):
    """Measure one configuration.

    Attributes:
        folder: where its files are written.
        cap_bytes: what the caching allocator may take.
        ranks: of several ranks those to run, one after another (`bench.emulated_gpu.twins`).
        keeps_requests: whether what the last of them asks of the allocator is kept.
    """

    configuration: Configuration
    parameters: int
    trainable_parameters: int
    largest_parameter: int
    folder: str
    cap_bytes: int | None = None
    ranks: tuple[int, ...] = (0,)
    keeps_requests: bool = False


class Attention(msgspec.Struct, frozen=True, order=True, kw_only=True):
    """A kernel that CUDA chose in a run, and the one that a dry run assumes for the same tensors."""

    kernel: str
    predicted: str
    dtype: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    masked: bool


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome; all sizes in bytes.

    Attributes:
        constants: of the device, where they were asked for.
        model: what was run, for a record.
        rss_before_bytes: resident set of the process before the run; `rss_peak_bytes`: its highest during it.
        phases: the peak of each phase; empty where the run failed.
        of_gpu: reserved, outside and device bytes, as in `RankMeasurement`.
        attention: the kernels chosen.
        requests: of each rank the file with what it asked of the allocator (`bench.gpu.streams`), in `folder`.
        deepspeed_bytes: DeepSpeed's own estimate for the model.
        accelerate_bytes: accelerate's.
        seconds: that the run took.
        survived: whether memory was enough.
        clean: whether nothing of the run is left in this process.
        failure: of another kind than memory.
    """

    constants: dict[str, Any] | None = None
    model: ModelDefinition | None = None
    rss_before_bytes: int = 0
    rss_peak_bytes: int = 0
    phases: dict[str, int] = {}
    of_gpu: dict[str, int] = {}
    attention: tuple[Attention, ...] = ()
    requests: tuple[str, ...] = ()
    deepspeed_bytes: int = 0
    accelerate_bytes: int = 0
    seconds: float = 0.0
    survived: bool = True
    clean: bool = True
    failure: str | None = None


def main() -> None:
    """Answer every question on standard input."""
    kind = sys.argv[1]
    if kind == "cpu":
        os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "1"}
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    answers = _protect_stdout()
    for line in sys.stdin.buffer:
        question = msgspec.json.decode(line, type=Constants | Run)
        try:
            answer = _constants(kind) if isinstance(question, Constants) else _run(question, kind)
        except Exception as error:  # a failure is a result
            answer = Answer(failure=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}", clean=False)
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()
    os._exit(0)


def _protect_stdout() -> BinaryIO:
    """A private copy of standard output; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _run(question: Run, kind: str) -> Answer:
    """The ranks asked for, each alone; of several the most that any takes."""
    world_size = question.configuration.world_size
    if world_size == 1:
        return _run_rank(question, kind, 0)
    from bench.emulated_gpu.twins import alone

    answers: list[Answer] = []
    for rank in question.ranks:
        with alone(rank, world_size):
            answers.append(_run_rank(question, kind, rank))
        if not answers[-1].survived:
            return answers[-1]
    return _merged(answers)


def _merged(answers: list[Answer]) -> Answer:
    """The most of any rank, each figure by itself."""
    last = answers[-1]
    return msgspec.structs.replace(
        last,
        phases={name: max(each.phases[name] for each in answers) for name in last.phases},
        of_gpu={name: max(each.of_gpu[name] for each in answers) for name in last.of_gpu},
        attention=tuple(sorted({kernel for each in answers for kernel in each.attention})),
        requests=tuple(path for each in answers for path in each.requests),
        seconds=sum(each.seconds for each in answers),
        clean=all(each.clean for each in answers),
    )


def _run_rank(question: Run, kind: str, rank: int) -> Answer:
    import torch

    from frugal.config.hardware import cuda_allocator, local_host
    from frugal.deepspeed_adapter.kernels import DTYPES
    from frugal.distributed import process_group
    from frugal.distributed.env import silence_libraries
    from frugal.engine.measure.two_steps import definition, watched
    from frugal.models.resolve import resolve
    from frugal.planning.memory.timeline import phase_peaks

    silence_libraries()
    here = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(here)
        total = torch.cuda.mem_get_info(here)[1]
        torch.cuda.set_per_process_memory_fraction((question.cap_bytes or total) / total, here)
    process_group.form()
    blank = device("cuda" if kind == "cuda" else "cpu", 1 << 50)
    plan = question.configuration.plan(Path(question.folder), blank, question.trainable_parameters)
    segments = replace(plan.strategy, expandable_segments=bool(cuda_allocator.expandable(os.environ)))
    plan = replace(plan, strategy=segments).sealed()
    spec = replace(resolve(plan.request.model, plan.request.task), lora=plan.request.lora)
    before = local_host.forget_peak_rss()
    start = time.perf_counter()
    chosen: set[Attention] = set()
    try:
        with _watching_attention(chosen, kind), _keeping_requests(question) as requests, _between(question, spec):
            build = _with_quick_weights(lambda: spec.build(dtype=DTYPES[plan.request.precision]))
            seen = watched(
                build,
                spec.objective(pack=bool(plan.request.pack), document_tokens=plan.request.document_tokens),
                plan,
                here,
                2,
            )
    except torch.OutOfMemoryError:
        return Answer(survived=False, clean=False, seconds=time.perf_counter() - start)
    return Answer(
        model=definition(spec),
        rss_before_bytes=before,
        rss_peak_bytes=local_host.peak_rss(),
        phases=phase_peaks(seen.intervals),
        of_gpu=seen.of_gpu,
        attention=tuple(sorted(chosen)),
        requests=_kept(requests, Path(question.folder), rank, phase_peaks(seen.intervals), seen.of_gpu),
        deepspeed_bytes=_deepspeed(question),
        accelerate_bytes=_accelerate(question),
        seconds=time.perf_counter() - start,
        clean=_is_clean(kind),
    )


@contextmanager
def _keeping_requests(question: Run) -> Iterator[Any]:
    """Yield what is asked of the allocator, where that is to be kept."""
    if not question.keeps_requests:
        yield None
        return
    from bench.gpu.streams import recording

    with recording() as requests:
        yield requests


def _kept(requests: Any, folder: Path, rank: int, phases: dict[str, int], of_gpu: dict[str, int]) -> tuple[str, ...]:
    """The file that whoever asked makes a stream of; none where something was cached before, which it would lack."""
    if requests is None or not requests.is_whole:
        return ()
    path = folder / f"requests-{os.getpid()}-{time.monotonic_ns()}.json"
    peaks = {"rank": rank, "allocated_bytes": phases, "reserved_bytes": of_gpu["reserved_bytes"]}
    told = {name: value for name, value in vars(requests).items() if name != "is_whole"}
    path.write_bytes(msgspec.json.encode(told | peaks))
    return (str(path),)


@contextmanager
def _between(question: Run, spec: Any) -> Iterator[None]:
    """Before the second step an evaluation, or a checkpoint, if the configuration has one."""
    from frugal.engine.measure import two_steps

    what = question.configuration.between
    if what == "nothing":
        yield
        return
    initialize, steps = two_steps.initialize, 0

    def initialized(model: Any, plan: Any, objective: Any, **how: Any) -> Any:
        engine = initialize(model, plan, objective, **how)
        accumulate = engine.accumulate

        def after_the_first(batches: Any, targets: int) -> Any:
            nonlocal steps
            steps += 1
            if steps == 2 and what == "evaluation":
                _evaluate(engine, batches)
            elif steps == 2:
                engine.save(Path(question.folder) / f"checkpoint-{os.getpid()}-{time.monotonic_ns()}")
            return accumulate(batches, targets)

        engine.accumulate = after_the_first
        return engine

    with patch.object(two_steps, "initialize", initialized):
        yield


def _evaluate(engine: Any, batches: list[Any]) -> None:
    """Forward without gradients on batches as in training."""
    import torch

    engine.deepspeed.eval()
    with torch.no_grad():
        for batch in batches:
            on_device = {name: tensor.to(engine.device) for name, tensor in batch.items()}
            engine.objective.loss_sum(engine.deepspeed, on_device)
    engine.deepspeed.train()


def _is_clean(kind: str) -> bool:
    """Give back what is cached; whether that was all."""
    import torch

    gc.collect()
    gc.collect()  # parameters in cycles with hooks of their own are free after the second time only
    if kind == "cpu":
        return True
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() <= LEFT_BYTES


def _with_quick_weights(build: Callable[[], Any]) -> Callable[[], Any]:
    """`build` with a constant instead of random numbers: billions of them would take minutes, and no other memory."""
    import torch

    def fill(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor if EMULATED in os.environ else tensor.fill_(WEIGHT)  # no kernel reads it

    def quick() -> Any:
        with (
            patch.object(torch.Tensor, "normal_", fill),
            patch.object(torch.Tensor, "uniform_", fill),
            patch.object(torch.nn.init, "_no_grad_trunc_normal_", fill),  # draws until all are within its bounds
        ):
            return build()

    return quick


@contextmanager
def _watching_attention(chosen: set[Attention], kind: str) -> Iterator[None]:
    """Ask torch which attention kernel it takes for the tensors of each call, and frugal which one it would expect."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend

    from frugal.dryrun.trace.cuda_kernels import AttentionCall, chosen_kernel

    attention = F.scaled_dot_product_attention
    names = {
        SDPBackend.FLASH_ATTENTION.value: "flash",
        SDPBackend.CUDNN_ATTENTION.value: "cudnn",
        SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
        SDPBackend.MATH.value: "math",
    }

    def watched(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        number = torch._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, **options)
        call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, **options)
        chosen.add(
            Attention(
                kernel=names.get(number, str(number)),
                predicted=chosen_kernel(call, torch.cuda.get_device_capability()),
                dtype=str(query.dtype).removeprefix("torch."),
                query=tuple(query.shape),
                key=tuple(key.shape),
                masked=attn_mask is not None,
            )
        )
        return attention(query, key, value, attn_mask, dropout_p, is_causal, **options)

    if kind == "cpu":
        yield
        return
    with patch.object(F, "scaled_dot_product_attention", watched):
        yield


def _constants(kind: str) -> Answer:
    from bench.gpu.constants import constants

    return Answer(constants=constants(), clean=_is_clean(kind))


def _deepspeed(question: Run) -> int:
    """DeepSpeed's own estimate of model states on one GPU, without offloading; it has none below ZeRO-2."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero_3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero_2

    nowhere_else = {"cpu_offload": False}
    if question.configuration.zero_stage < 3:
        return int(zero_2(question.parameters, **nowhere_else)[1])
    return int(zero_3(question.parameters, question.largest_parameter, cpu_offload_params=False, **nowhere_else)[1])


def _accelerate(question: Run) -> int:
    """Return what `accelerate estimate-memory` prints as `Training w/ Adam`: it knows the model, not the batch."""
    from accelerate.commands.estimate import estimate_training_usage

    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    return int(max(estimate_training_usage(4 * question.parameters, names[question.configuration.precision]).values()))


if __name__ == "__main__":
    main()
