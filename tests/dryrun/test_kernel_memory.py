"""Records of single calls in a dry run against CUDA's on every kind of card: requests, and kernels taken."""

import lzma
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.constants import peak_inside
from bench.kernels import attention
from bench.kernels.attention import Choices
from bench.kernels.reductions import Taken
from bench.kernels.requests import Attention, Call, Event, Operator, Requests, prepare
from frugal.config.hardware.cluster import CARDS, Capability, kernel_class
from frugal.dryrun.trace.cuda_kernels import AttentionCall, chosen_kernel, kernels_of
from frugal.dryrun.trace.kernel_memory import OUTPUTS, scratch
from frugal.dryrun.trace.recorder import Tracker
from frugal.dryrun.trace.trace import Recorder

T = TypeVar("T")


def answers(name: str, kind: type[T]) -> T:
    """Return what was recorded of CUDA."""
    return msgspec.json.decode(lzma.decompress((Path(__file__).parent / f"{name}.json.xz").read_bytes()), type=kind)


CUDA = answers("kernel_requests", Requests)
REDUCTIONS = answers("reduction_requests", Taken)
CHOICES = answers("attention_choices", Choices)
CAPABILITIES = {tuple(map(int, name.split("."))): answers for name, answers in CHOICES.answers.items()}
SMALL = 64 << 10
"""Bytes; CUB's scans take some KiB, which no dry run records."""


def recorded(call: Call, capability: Capability, kind: type[Tracker] = Tracker) -> list[Event]:
    """Blocks of a dry run as the allocator rounds them, taken and given back."""
    return requests(prepare(call, "meta"), capability, kind)


def requests(run: Callable[[], object], capability: Capability, kind: type[Tracker] = Tracker) -> list[Event]:
    """Blocks that a function takes and gives back, as the allocator rounds them."""
    tracker = kind("cuda", capability=capability)
    tracker._building = False  # as after a model was built
    with kernels_of("cuda", capability), tracker:
        run()
    timeline = tracker.timeline()
    alive: set[int] = set()
    events = []
    for storage in timeline.events:
        size = -(-timeline.fixed[storage] // 512) * 512
        if size:
            events.append(-size if storage in alive else size)
            alive.add(storage)
    return events


def peak(events: list[Event]) -> int:
    """The most bytes at once."""
    live = most = 0
    for event in events:
        live += event
        most = max(most, live)
    return most


def test_there_are_requests_of_a_real_card_and_of_another() -> None:
    """Records of 9.0 are an H200's, the others of emulated cards."""
    assert CUDA.events.keys() >= {"7.5", "8.0", "8.6", "9.0"}
    assert all(sum(map(bool, events)) > 50 for events in CUDA.events.values())


@pytest.mark.parametrize("name", CUDA.events)
def test_attention_asks_for_the_same_blocks_in_the_same_order(name: str) -> None:
    """Forward and backward of every kernel: every block, taken and given back, to the byte."""
    capability = kernel_class(tuple(map(int, name.split("."))))  # type: ignore[arg-type]  # two numbers
    for call, events in zip(CUDA.calls, CUDA.events[name], strict=True):
        if isinstance(call, Attention):
            ours = recorded(call, capability)
            assert ours[: len(events)] == events, call


@pytest.mark.parametrize("name", CUDA.events)
def test_operators_reach_the_same_peak(name: str) -> None:
    """Outputs and what is taken besides: all but scans of some KiB; more only for embeddings of a few rows."""
    capability = kernel_class(tuple(map(int, name.split("."))))  # type: ignore[arg-type]  # two numbers
    for call, events in zip(CUDA.calls, CUDA.events[name], strict=True):
        if events and not isinstance(call, Attention):
            more = peak(recorded(call, capability)) - peak(events)
            has_few_rows = isinstance(call, Operator) and call.name.startswith("embedding") and call.arguments[2] < 500
            assert -SMALL <= more <= (peak(events) * 10 if has_few_rows else SMALL), call


def test_a_trace_stands_for_larger_micro_batches() -> None:
    """Where few indices are not sorted, a trace counts what many would take, so that it holds for all sizes."""
    few = Operator("embedding_dense_backward.default", (("float32", (3, 64, 8)), ("int64", (3, 64)), 100, -1, False))
    exact, for_all = (peak(recorded(few, (8, 0), kind)) for kind in (Tracker, Recorder))
    assert for_all > exact


def test_blocks_are_counted_where_they_live_together() -> None:
    """A block that went is not added to the next."""
    assert peak_inside((100, OUTPUTS, 50, -1, 20)) == 150


def births(run: Callable[[Tensor], object], values: Tensor) -> list[int]:
    """Bytes of what is taken, on a T4, in order."""
    tracker = Tracker("cuda", capability=(7, 5))
    tracker._building = False
    with kernels_of("cuda", (7, 5)), tracker:
        run(values)
    return list(tracker.timeline().fixed)


def test_what_the_emulated_card_is_asked_for_in_masks_and_clamps_of_t5() -> None:
    """Seen in the request stream of T5 in fp16 on an emulated T4: `ge`, `le` and the result, no third mask."""
    hidden = torch.empty(16, 512, 512, dtype=torch.float16, device="meta", requires_grad=True)

    def clamp(values: Tensor) -> None:
        values.clamp(min=-1.0, max=1.0).backward(torch.ones_like(values))

    masks = [size for size in births(clamp, hidden) if size == hidden.numel()]
    assert len(masks) == 2
    assert births(torch.isinf, hidden.detach()) == [hidden.nbytes, hidden.numel()]

    def mask(values: Tensor) -> Tensor:
        rows, columns = torch.empty(16, 1, dtype=torch.int64, device="meta"), values
        return torch.empty(16, 512, dtype=torch.bool, device="meta")[rows, columns]

    columns = torch.empty(512, dtype=torch.int64, device="meta")
    assert births(mask, columns)[-3:] == [65536, 65536, 8192]


SOFTMAX = {
    ("float16", None): ([2], [2, 2, 2, -2], [2, 2, -2]),
    ("float16", "float32"): ([4], [4, 2, 4, -4], [4, 2, -4]),
    ("float16", "float64"): ([8, 8, -8], [8, 8, 8, -8, 2, -8], [8, 8, 2, -8]),
    ("bfloat16", None): ([2], [2, 2, 2, -2], [2, 2, -2]),
    ("bfloat16", "float32"): ([4, 4, -4], [4, 4, 4, -4, 2, -4], [4, 4, 2, -4]),
    ("float32", "float32"): ([4], [4, 4, 4, -4], [4, 4, -4]),
    ("float32", "float64"): ([8, 8, -8], [8, 8, 8, -8, 4, -8], [8, 8, 4, -8]),
}
"""Bytes an element that softmax takes and gives back on an emulated A100, from a type to another: in forward, in its
backward from the gradient of its result on, and in that of its logarithm."""
FORMS = (
    F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, torch.special.softmax, torch.special.log_softmax,
    Tensor.softmax, Tensor.log_softmax,
)  # fmt: skip
ELEMENTS = 1 << 18


@pytest.mark.parametrize(("read", "written"), SOFTMAX)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("form", FORMS)
def test_softmax_copies_its_input_except_from_fp16_to_fp32(
    form: Callable[..., Tensor], mode: Callable[[], AbstractContextManager[object]], read: str, written: str | None
) -> None:
    """CUDA has a kernel for these two types alone. The last blocks may be given back in any order."""
    forward, *backwards = SOFTMAX[read, written]
    values = torch.empty(ELEMENTS // 64, 64, dtype=getattr(torch, read), device="meta", requires_grad=True)
    out: list[Tensor] = []

    def run() -> None:
        with mode():
            out.append(form(values, dim=-1, dtype=written and getattr(torch, written)))

    def run_both() -> None:
        run()
        out[-1].backward(torch.ones_like(out[-1]))

    taken = requests(run, (8, 0))
    assert [each / ELEMENTS for each in taken] == forward
    if mode is torch.enable_grad:
        expected = [*forward, *backwards["log" in form.__name__]]
        assert [each / ELEMENTS for each in requests(run_both, (8, 0))][: len(expected)] == expected


@pytest.mark.parametrize("form", FORMS)
def test_a_cpu_copies_fp16_before_its_softmax(form: Callable[..., Tensor]) -> None:
    """Also after a dry run of a card, which leaves torch's own kernels behind."""
    values = torch.empty(8, 64, dtype=torch.float16, device="meta")
    with kernels_of("cuda"):
        pass
    with kernels_of("cpu"), Tracker("cpu") as tracker:
        tracker._building = False
        form(values, dim=-1, dtype=torch.float32)
    assert list(tracker.timeline().fixed) == [4 * values.numel()] * 2


aten, IMAGE, TEXT = torch.ops.aten, (16, 32, 64, 64), (16, 256, 1024)
READ_CONTIGUOUS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], object], list[float], bool]] = {
    "native_layer_norm": (TEXT, lambda x: aten.native_layer_norm(x, [1024], None, None, 1e-5), [1, 1, -1], False),
    "_fused_rms_norm": (TEXT, lambda x: aten._fused_rms_norm(x, [1024], None, 1e-5), [1, 1, -1], False),
    "_softmax": (TEXT, lambda x: aten._softmax(x, -1, False), [1, 1, -1], False),
    "_log_softmax": (TEXT, lambda x: aten._log_softmax(x, 1, False), [1, 1, -1], False),
    "cumsum": (TEXT, lambda x: aten.cumsum(x, -1), [1, 1, -1], False),
    "cumprod": (TEXT, lambda x: aten.cumprod(x, -1), [1, 1, -1], False),
    "max_pool2d_with_indices": (IMAGE, lambda x: aten.max_pool2d_with_indices(x, [2, 2]), [1 / 4, 1 / 2, 1, -1], True),
    "avg_pool2d": (IMAGE, lambda x: aten.avg_pool2d(x, [2, 2]), [1 / 4, 1, -1], True),
    "_adaptive_avg_pool2d": (IMAGE, lambda x: aten._adaptive_avg_pool2d(x, [8, 8]), [1, 1 / 64, -1], True),
    "adaptive_max_pool2d": (IMAGE, lambda x: aten.adaptive_max_pool2d(x, [8, 8]), [1 / 64, 1 / 32, 1, -1], False),
    "upsample_nearest2d": (IMAGE, lambda x: aten.upsample_nearest2d(x, [128, 128]), [4, 1, -1], True),
    "upsample_bilinear2d": (IMAGE, lambda x: aten.upsample_bilinear2d(x, [128, 128], False), [4], True),
    "reflection_pad2d": (IMAGE, lambda x: aten.reflection_pad2d(x, [32, 32, 32, 32]), [4, 1, -1], False),
    "convolution": (IMAGE, lambda x: convolved(x), [1, 1, -1], True),
}  # fmt: skip
"""An input's shape, the call, the blocks of 16 KiB and more that an emulated A100 takes and gives back where the input
is transposed, in its own size, and whether one with channels last is read as it is."""


def convolved(image: Tensor) -> Tensor:
    """Convolve with as many channels as there are."""
    kernel = torch.empty(32, 32, 3, 3, device="meta")
    return torch.convolution(image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


@pytest.mark.parametrize("name", READ_CONTIGUOUS)
def test_a_kernel_copies_an_input_that_it_cannot_read_as_it_lies(name: str) -> None:
    """What torch reads with strides, or has in rows already, is not copied."""
    shape, call, expected, reads_channels_last = READ_CONTIGUOUS[name]
    plain = torch.empty(shape, device="meta")
    transposed = torch.empty(shape[1], shape[0], *shape[2:], device="meta").transpose(0, 1)

    def of(values: Tensor) -> list[float]:
        kept: list[object] = []
        found = [each / plain.nbytes for each in requests(lambda: kept.append(call(values)), (8, 0))]
        return [each for each in found if abs(each) >= 1 / 64]

    outputs = expected if -1 not in expected else [each for each in expected if each != -1]
    if -1 in expected:
        outputs.remove(1)
    assert of(plain) == outputs
    assert of(transposed) == expected
    if len(shape) == 4:
        channels_last = of(plain.contiguous(memory_format=torch.channels_last))
        assert channels_last == (outputs if reads_channels_last else expected)


@pytest.fixture(scope="module")
def calls() -> list[AttentionCall]:
    """Every case as tensors on meta."""
    return [
        AttentionCall(*attention.arguments(case, "meta"), case.dropout, case.is_causal, enable_gqa=case.enable_gqa)
        for case in CHOICES.cases
    ]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_choice_is_torchs_own(calls: list[AttentionCall], capability: tuple[int, int]) -> None:
    """The rule, asked for the class of cards that a dry run is made for, answers as torch on the card."""
    ours = "".join(chosen_kernel(call, kernel_class(capability))[0].upper() for call in calls)
    differing = [case for case, a, b in zip(CHOICES.cases, ours, CAPABILITIES[capability], strict=True) if a != b]
    assert not differing, differing[:3]
    assert len(ours) >= 8000


def test_every_card_has_its_answers() -> None:
    """No card of ours is of a capability that torch was not asked on."""
    assert {card.compute_capability for card in CARDS.values()} <= set(CAPABILITIES)


def test_the_calls_are_of_several_cards_and_many_take_something() -> None:
    assert len(REDUCTIONS.sizes) >= 4
    for sizes in REDUCTIONS.sizes.values():
        assert len(sizes) == len(REDUCTIONS.calls) >= 400
        assert sum(map(bool, sizes)) > 50


@pytest.mark.parametrize("threads", REDUCTIONS.sizes)
def test_a_reduction_takes_what_torch_asks_for_inside_to_the_byte(threads: str) -> None:
    for call, sizes in zip(REDUCTIONS.calls, REDUCTIONS.sizes[threads], strict=True):
        ours = scratch(call.values("meta"), call.dimensions, int(threads), wide=call.name != "linalg_vector_norm")
        assert list(ours) == sizes, call
