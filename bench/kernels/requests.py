"""`python -m bench.kernels.requests FILE`: what single calls take from CUDA's allocator, request by request.

Attention forward and backward, and the operators that need more than they return. The history of the allocator of this
machine's card, real or emulated, is added to FILE (JSON, xz) under the card's compute capability, so that `make test`
holds what a dry run records to all of them without a GPU. Sizes are rounded to 512 bytes, as the allocator rounds them.
"""

import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

Event = int
"""Bytes of a block that is taken, or those of one that is given back, negative."""


class Attention(msgspec.Struct, frozen=True, tag=True):
    """Forward and backward of one `F.scaled_dot_product_attention`; heads beside each other, as models have them."""

    batch: int
    heads: int
    key_heads: int
    length: int
    key_length: int
    head_size: int
    value_size: int
    dtype: str = "bfloat16"
    mask_dtype: str = ""
    mask_shape: tuple[int, ...] = ()
    mask_requires_grad: bool = False
    dropout: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False


class Operator(msgspec.Struct, frozen=True, tag=True):
    """One call of `torch.ops.aten.NAME`; tensors are `(type, shape)`, all else is passed on."""

    name: str
    arguments: tuple[Any, ...]


class Documents(msgspec.Struct, frozen=True, tag=True):
    """Forward and backward of `torch.nn.attention.varlen.varlen_attn`, of packs of as many documents at most."""

    tokens: int
    documents: int
    heads: int
    key_heads: int
    head_size: int
    window: int = -1
    dtype: str = "bfloat16"
    name: str = "varlen_attn"


Call = Attention | Operator | Documents


class Requests(msgspec.Struct):
    """For each compute capability the requests of each call; none where the card has no kernel for it."""

    torch: str
    command: str
    calls: list[Call]
    events: dict[str, list[list[Event]]]


def calls() -> list[Call]:
    """Return what is recorded: every kernel on every card, at its edges."""
    half, full, gqa = "bfloat16", "float32", {"is_causal": True, "enable_gqa": True}
    masked: dict[str, Any] = {"mask_dtype": "bool", "mask_shape": (2, 1, 1000, 1000)}
    attention = [
        Attention(1, 32, 4, 1024, 1024, 64, 64, full, **gqa),
        Attention(1, 71, 1, 512, 512, 64, 64, half, is_causal=True),
        Attention(2, 16, 4, 1000, 1000, 96, 96, half, **gqa),
        Attention(2, 16, 4, 1000, 1000, 96, 96, full, **gqa),
        Attention(2, 8, 2, 1024, 1024, 100, 100, half, "bfloat16", (1, 1, 1024, 1024), True, enable_gqa=True),
        Attention(2, 8, 2, 1000, 1000, 64, 64, half, **masked, enable_gqa=True, dropout=0.1),
        Attention(2, 8, 8, 1001, 1001, 64, 64, full, "float32", (2, 1, 1, 1001)),
        Attention(2, 8, 8, 1004, 1004, 64, 64, half, "bool", (2, 1, 1004, 1004)),
        Attention(2, 8, 8, 1004, 1004, 64, 64, full, "float32", (2, 1, 1004, 1004), True),
        Attention(2, 8, 8, 1000, 700, 128, 128, half, "bool", (2, 1, 1000, 700), dropout=0.1),
        Attention(300, 2, 2, 128, 100, 160, 160, half, "bfloat16", (1, 1, 128, 100)),
        Attention(1, 1, 1, 1000, 1000, 64, 64, full),
    ]
    for dtype in ("float16", half, full):
        for size, value_size in ((64, 64), (72, 72), (100, 100), (128, 128), (192, 128), (256, 256), (264, 264)):
            attention.append(Attention(2, 8, 8, 1000, 1000, size, value_size, dtype, is_causal=True))
            attention.append(Attention(2, 8, 8, 1000, 1000, size, value_size, dtype, **masked))
        attention.append(Attention(2, 8, 8, 1000, 1000, 96, 96, dtype, is_causal=True, dropout=0.1))
        attention.append(Attention(2, 8, 8, 1000, 1000, 96, 96, dtype, **masked, dropout=0.1))
    packs = [
        Documents(8192, 129, 32, 8, 128),
        Documents(1000, 7, 8, 8, 64, 99, "float16"),
        Documents(1000, 300, 8, 2, 96),
        Documents(2048, 33, 16, 4, 160),
    ]
    return [*attention, *packs, *_operators()]


def _operators() -> list[Operator]:
    long = "int64"
    embedding = [
        Operator(
            "embedding_dense_backward.default",
            ((dtype, (batch, length, width)), (long, (batch, length)), vocabulary, -1, False),
        )
        for batch, length, width, vocabulary, dtype in (
            (8, 1024, 768, 50_000, "bfloat16"), (8, 1024, 768, 4000, "bfloat16"), (8, 1024, 768, 2, "float32"),
            (3, 1024, 768, 50_000, "bfloat16"), (1, 3073, 100, 50_000, "float16"), (4, 8192, 512, 32_000, "float32"),
        )
    ]  # fmt: skip
    scores = (4, 16, 512, 512)
    return [
        *embedding,
        *(
            Operator(f"{name}.default", ((dtype, scores), (dtype, scores), -1, dtype))
            for name in ("_softmax_backward_data", "_log_softmax_backward_data")
            for dtype in ("bfloat16", "float32")
        ),
        Operator("_safe_softmax.default", (("float32", scores), -1)),
        Operator("native_dropout.default", (("bfloat16", scores), 0.1, True)),
        Operator("cumsum.default", (("bool", (8, 4096)), -1)),
        Operator("cumsum.default", (("float32", (8, 4096)), -1)),
        Operator("native_layer_norm_backward.default", (
            ("bfloat16", (8, 1024, 768)), ("bfloat16", (8, 1024, 768)), [768], ("float32", (8, 1024, 1)),
            ("float32", (8, 1024, 1)), ("bfloat16", (768,)), ("bfloat16", (768,)), [True, True, True],
        )),
        Operator("nll_loss_backward.default", (
            ("float32", ()), ("float32", (4096, 5000)), (long, (4096,)), None, 1, -100, ("float32", ()),
        )),
    ]  # fmt: skip


def prepare(call: Call, device: str) -> Callable[[], None]:
    """A function that makes the call, and lets all go that it made."""
    if isinstance(call, Attention):
        return _attention(call, device)
    if isinstance(call, Documents):
        return _documents(call, device)
    function = torch.ops.aten
    for part in call.name.split("."):
        function = getattr(function, part)
    arguments = [_made(each, device) for each in call.arguments]

    def run() -> None:
        function(*arguments)

    return run


def _made(argument: Any, device: str) -> Any:
    if isinstance(argument, (tuple, list)) and len(argument) == 2 and isinstance(argument[0], str):
        return torch.zeros(tuple(argument[1]), dtype=getattr(torch, argument[0]), device=device)
    return getattr(torch, argument) if isinstance(argument, str) else argument


def _attention(call: Attention, device: str) -> Callable[[], None]:
    def tensor(heads: int, length: int, size: int) -> Tensor:
        empty = torch.empty(call.batch, length, heads, size, dtype=getattr(torch, call.dtype), device=device)
        return empty.transpose(1, 2).requires_grad_()

    query = tensor(call.heads, call.length, call.head_size)
    key, value = (tensor(call.key_heads, call.key_length, size) for size in (call.head_size, call.value_size))
    mask = None
    if call.mask_dtype:
        mask = torch.empty(call.mask_shape, dtype=getattr(torch, call.mask_dtype), device=device)
        mask.requires_grad_(call.mask_requires_grad)

    def run() -> None:
        out = F.scaled_dot_product_attention(
            query, key, value, mask, call.dropout, call.is_causal, enable_gqa=call.enable_gqa
        )
        out.backward(torch.ones_like(out))

    return run


def _documents(call: Documents, device: str) -> Callable[[], None]:
    heads = (call.heads, call.key_heads, call.key_heads)
    shapes = ((call.tokens, each, call.head_size) for each in heads)
    states = [torch.empty(shape, dtype=getattr(torch, call.dtype), device=device).requires_grad_() for shape in shapes]
    offsets = torch.zeros(call.documents + 1, dtype=torch.int32, device=device)

    def run() -> None:
        ends, window, has_groups = (offsets, offsets, call.tokens, call.tokens), (call.window, 0), heads[0] != heads[1]
        out = varlen_attn(*states, *ends, window_size=window, enable_gqa=has_groups)
        assert isinstance(out, Tensor)
        out.backward(torch.ones_like(out))

    return run


def recorded(call: Call) -> list[Event]:
    """Return what the second call of its kind asks of the allocator; the first one may set up more."""
    for _ in range(2):
        run = prepare(call, "cuda")
        torch.cuda.synchronize()
        torch.cuda.memory._record_memory_history(max_entries=100_000, context=None, stacks="python")
        run()
        entries = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_requested": -1}
    return [signs[each["action"]] * (-(-each["size"] // 512) * 512) for each in entries if each["action"] in signs]


def main(path: Path) -> None:
    """Add this machine's card to the file."""
    wanted = calls()
    layer = torch.nn.Linear(64, 64, device="cuda")
    layer(torch.ones(64, 64, device="cuda")).sum().backward()  # cuBLAS takes its workspace
    torch.bmm(*(torch.ones(2, 64, 64, device="cuda") for _ in range(2)))
    events: dict[str, list[list[Event]]] = {}
    if path.exists():
        kept = msgspec.json.decode(lzma.decompress(path.read_bytes()), type=Requests)
        is_the_same = msgspec.json.encode(kept.calls) == msgspec.json.encode(wanted)  # lists or tuples
        events = kept.events if is_the_same and kept.torch == str(torch.__version__) else {}
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    events.pop(capability, None)
    for call in wanted:
        try:
            events.setdefault(capability, []).append(recorded(call))
        except RuntimeError:  # a card without this kernel
            events[capability].append([])
    data = Requests(str(torch.__version__), "python -m bench.kernels.requests FILE", wanted, events)
    path.write_bytes(lzma.compress(msgspec.json.encode(data), preset=9))
    print(f"{torch.cuda.get_device_name()} ({capability}): {sum(map(len, events[capability]))} requests")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
