"""A device's memory as a bar: a terminal shows it with a plan. Each part has a letter and a name beside its colour."""

from dataclasses import dataclass

from frugal.planning.batch import in_proportion
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.units import format_bytes

# Okabe and Ito's colours, which colour-blind people can tell apart, for light and dark; letters on them have a contrast
# of at least 4.5.
_PARTS = {
    "parameters": ("p", "#ffffff on #0072B2"), "gradients": ("g", "#000000 on #E69F00"),
    "optimizer": ("o", "#000000 on #009E73"), "activations": ("a", "#000000 on #CC79A7"),
    "logits": ("l", "#000000 on #56B4E9"), "communication": ("c", "#000000 on #D55E00"),
    "temporary": ("t", "#000000 on #F0E442"), "slack": ("s", "#000000 on #999999"),
    "context": ("x", "#000000 on #777777"), "headroom": (".", "dim"), "margin": ("-", "dim"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """A part of a device's memory: a category of the breakdown, or what stays free as `headroom` and as `margin`.

    `style`: as `rich` writes it, letters on a colour; free memory is dim.
    """

    name: str
    letter: str
    style: str
    size_bytes: int

    def named(self, share: int) -> str:
        """Return `share` characters, with name and size where there is room: `lll logits 1.00 GiB lll`."""
        for words in (f" {self.name} {format_bytes(self.size_bytes)} ", f" {self.name} "):
            if len(words) + 2 <= share:
                return words.center(share, self.letter)
        return self.letter * share


def bar(memory: MemoryBreakdown, device_bytes: int, width: int) -> list[tuple[BarPart, int]]:
    """Return the parts of a device, which are `device_bytes` together, with characters of each, `width` together."""
    sizes = {name: getattr(memory, name) for name in memory.CATEGORIES} | {"headroom": memory.headroom_bytes}
    sizes["margin"] = max(0, device_bytes - sum(sizes.values()))
    parts = [
        BarPart(name=name, letter=_PARTS[name][0], style=_PARTS[name][1], size_bytes=sizes[name]) for name in _PARTS
    ]
    return list(zip(parts, in_proportion(width, [part.size_bytes for part in parts]), strict=True))
