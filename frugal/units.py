"""Numbers with units, read from and written for people.

Memory: `12G` and `12GiB` are both 12 x 2^30 bytes, because that is what a "12 GB card" has; `12GB` is 12 x 10^9.
Output is always in GiB or MiB.

Counts: `4M` is 4,000,000 and `2B` is 2 x 10^9; of a sample's length `128k` is 131,072, as in the names of models.
"""

import re
from fractions import Fraction

from frugal.errors import RequestError, refuse

IGNORED = -100
"""The label of positions without a target, as in torch's cross entropy."""

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_BYTES = {
    "K": KIB, "KIB": KIB, "KB": 10**3,
    "M": MIB, "MIB": MIB, "MB": 10**6,
    "G": GIB, "GIB": GIB, "GB": 10**9,
    "T": TIB, "TIB": TIB, "TB": 10**12,
}  # fmt: skip
_MOST_BYTES = 2**60  # an exabyte
_COUNT = re.compile(r"(-?\d{1,18}(?:_\d{1,3}){0,6}(?:\.\d{1,18})?(?:e\+?\d{1,2})?)([kmbt]?)", re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Return the bytes in `text`, such as `12G`, `11.5GiB`, `800MB`.

    Raises:
        RequestError: no number, no unit, or an unknown unit.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise RequestError(
            f"`{text}` is not an amount of memory", hint="write a number and a unit, such as 12G or 800M"
        )
    number, unit = match.groups()
    size = float(number) * _BYTES.get(unit.upper(), 1)
    refuse(
        (
            not unit,
            f"`{text}` has no unit",
            f"{number} bytes is hardly what was meant",
            f"{number}G is {number} GiB ({number} x 2^30 bytes), {number}GB is {number} x 10^9 bytes",
        ),
        (
            unit.upper() not in _BYTES,
            f"`{text}` has an unknown unit `{unit}`",
            "",
            "units are K, M, G, T (powers of 2^10) and KB, MB, GB, TB (powers of 10^3)",
        ),
        (
            not 1 <= size <= _MOST_BYTES,
            f"`{text}` is no amount of memory that a machine has",
            "",
            "give the memory of one GPU, such as 12G or 80GB",
        ),
    )
    return int(size)


def parse_count(text: str, thousand: int = 1000) -> int:
    """Return the number in `text`, such as `512`, `128k`, `1.5M`, `2e9`; `k` stands for `thousand`, `M` for its square.

    Raises:
        RequestError: no number, or no whole one.
    """
    match = _COUNT.fullmatch(text.strip())
    number = None if match is None else Fraction(match[1]) * thousand ** " kmbt".index(match[2].lower() or " ")
    if number is None or number.denominator != 1:
        raise RequestError(f"`{text}` is no whole number", hint="write a count such as 512, 128k, 4M or 2B")
    return int(number)


def format_bytes(size: int) -> str:
    """Return `size` bytes as text: `11.42 GiB`, or `312.0 MiB` below one GiB."""
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB else f"{size / MIB:.1f} MiB"


def format_count(number: int) -> str:
    """Return a large count as text: `124.4M`, `8.03B`."""
    for scale, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(number) >= scale:
            return f"{number / scale:.2f}{suffix}"
    return str(number)


def format_number(value: float, decimals: int = 4) -> str:
    """Return a number with so many decimals, from a million on as a power of ten: `5.3314`, `3.21e+26`, `inf`."""
    return f"{value:.{decimals}f}" if abs(value) < 1e6 else f"{value:.2e}"


def format_rate(value: float) -> str:
    """Return a number of things a second: `4,148`, `36.4`, `0.126`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plural(number: int, noun: str) -> str:
    """Return a count with its noun: `1 GPU`, `4 GPUs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: `85 ms`, `12.3 s`, `4 min 05 s`, `3 h 20 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return f"{int(seconds) // 3600:,} h {int(seconds) % 3600 // 60:02d} min"
