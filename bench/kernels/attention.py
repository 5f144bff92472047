"""`python -m bench.kernels.attention FILE`: which attention kernel torch takes on this machine's card, case by case.

The answers are torch's own (`torch._fused_sdp_choice`), on a real card or on an emulated one. They are added to FILE
(JSON, xz) under the card's compute capability, so that `make test` holds frugal's port of the rule to all of them
without a GPU. The cases are drawn with a fixed seed; with other cases or another torch the file begins anew.
"""

import lzma
import random
import sys
from collections import Counter
from pathlib import Path

import msgspec
import torch
from torch import Tensor

NUM_CASES = 8_000
SEED = 15

HEAD_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 36, 40, 48, 64, 72, 80, 96, 100, 112, 120, 128, 136, 144, 160, 176, 192,
              200, 208, 224, 232, 240, 256, 264, 288, 320, 384, 512)  # fmt: skip
LENGTHS = (1, 2, 7, 16, 64, 65, 100, 128, 197, 512, 1000, 1024)
LAYOUTS = ("plain", "transposed", "packed", "last", "offset")


class Case(msgspec.Struct, frozen=True, array_like=True):
    """One call. Sizes as in `(batch, heads, length, head_size)`; `mask_shape` None: without a mask."""

    dtype: str
    batch: int
    heads: int
    key_heads: int
    length: int
    key_length: int
    head_size: int
    value_size: int
    layout: str
    requires_grad: bool
    mask_dtype: str
    mask_shape: tuple[int, ...] | None
    mask_requires_grad: bool
    dropout: float
    is_causal: bool
    enable_gqa: bool


class Choices(msgspec.Struct):
    """Torch's answers: for each compute capability a letter a case, the first of the kernel's name."""

    torch: str
    command: str
    cases: list[Case]
    answers: dict[str, str]


def case(random_: random.Random) -> Case:
    """A call as models make it, or nearly."""
    heads = random_.choice((1, 2, 4, 12, 16, 71))
    key_heads = heads if random_.random() < 0.6 else random_.choice([n for n in (1, 2, 3, 4, heads) if n <= heads])
    length = random_.choice(LENGTHS)
    key_length = length if random_.random() < 0.75 else random_.choice(LENGTHS)
    head_size = random_.choice(HEAD_SIZES)
    batch = random_.choice((1, 2, 4))
    mask_shape = None
    if random_.random() < 0.5:
        mask_shape = (random_.choice((1, length)), random_.choice((1, key_length, key_length, key_length)))
        if random_.random() < 0.7:
            mask_shape = (random_.choice((1, batch)), random_.choice((1, heads)), *mask_shape)
        elif random_.random() < 0.3:
            mask_shape = (random_.choice((1, heads)), *mask_shape)
    dtype = random_.choice(("bfloat16", "float16", "float32"))
    mask_dtype = random_.choice(("bool", dtype))
    return Case(
        dtype=dtype,
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        length=length,
        key_length=key_length,
        head_size=head_size,
        value_size=head_size if random_.random() < 0.8 else random_.choice(HEAD_SIZES),
        layout=random_.choice(("plain", "transposed", random_.choice(LAYOUTS))),
        requires_grad=random_.random() < 0.8,
        mask_dtype=mask_dtype,
        mask_shape=mask_shape,
        mask_requires_grad=mask_dtype != "bool" and random_.random() < 0.2,
        dropout=random_.choice((0.0, 0.0, 0.1, 0.125)),
        is_causal=mask_shape is None and random_.random() < 0.5,
        enable_gqa=random_.random() < (0.3 if heads == key_heads else 0.7),
    )


def arguments(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value and mask of a case."""
    dtype = getattr(torch, case.dtype)
    shapes = (
        (case.batch, case.heads, case.length, case.head_size),
        (case.batch, case.key_heads, case.key_length, case.head_size),
        (case.batch, case.key_heads, case.key_length, case.value_size),
    )
    query, key, value = (
        _tensor(shape, case.layout, dtype, device).requires_grad_(case.requires_grad) for shape in shapes
    )
    if case.mask_shape is None:
        return query, key, value, None
    mask = torch.empty(case.mask_shape, dtype=getattr(torch, case.mask_dtype), device=device)
    return query, key, value, mask.requires_grad_(case.mask_requires_grad)


def _tensor(shape: tuple[int, int, int, int], layout: str, dtype: torch.dtype, device: str) -> Tensor:
    """Return one of `shape`, laid out as models have it: heads beside each other, q, k and v of one product, and
    worse."""
    batch, heads, length, size = shape
    if layout == "transposed":
        return torch.empty(batch, length, heads, size, dtype=dtype, device=device).transpose(1, 2)
    if layout == "packed":
        return torch.empty(batch, length, heads, 3 * size, dtype=dtype, device=device)[..., :size].transpose(1, 2)
    if layout == "last":
        return torch.empty(batch, heads, size, length, dtype=dtype, device=device).transpose(2, 3)
    if layout == "offset":
        return torch.empty(batch * heads * length * size + 1, dtype=dtype, device=device)[1:].view(shape)
    return torch.empty(shape, dtype=dtype, device=device)


def choices(cases: list[Case]) -> str:
    """Return what torch takes on the current device."""
    letters = {backend.value: name[0] for name, backend in torch.nn.attention.SDPBackend.__members__.items()}
    answers = []
    for each in cases:
        query, key, value, mask = arguments(each, "cuda")
        chosen = torch._fused_sdp_choice(
            query, key, value, mask, each.dropout, each.is_causal, enable_gqa=each.enable_gqa
        )
        answers.append(letters[chosen])
    return "".join(answers)


def main(path: Path) -> None:
    """Add this machine's card to the answers in the file."""
    random_ = random.Random(SEED)
    cases = [case(random_) for _ in range(NUM_CASES)]
    answers: dict[str, str] = {}
    if path.exists():
        kept = msgspec.json.decode(lzma.decompress(path.read_bytes()), type=Choices)
        answers = kept.answers if (kept.torch, kept.cases) == (str(torch.__version__), cases) else {}
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    answers[capability] = choices(cases)
    data = Choices(str(torch.__version__), "python -m bench.kernels.attention FILE", cases, answers)
    path.write_bytes(lzma.compress(msgspec.json.encode(data), preset=9))
    print(f"{torch.cuda.get_device_name()} ({capability}): {dict(Counter(answers[capability]))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
