"""`python -m bench.planning.shipped [PRESET ...]`: makes the traces that are shipped with frugal again.

They hold for the versions of torch and transformers with which they were made; see `frugal.dryrun.shipped`.
"""

import lzma
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import msgspec

from frugal.config.hardware.cluster import CARDS, Capability, kernel_class
from frugal.config.request import Request
from frugal.dryrun import shipped
from frugal.dryrun.cache import presets
from frugal.dryrun.messages import AskCheck, AskFacts, AskTrace
from frugal.dryrun.pool import Pool
from frugal.errors import FrugalError
from frugal.planning.model_facts import ModelFacts
from frugal.planning.strategy import ActivationCheckpointing

CLASSES = sorted({kernel_class(card.compute_capability) for card in CARDS.values() if card.has_bf16})


def make(model: str, mode: ActivationCheckpointing, pool: Pool) -> shipped.Shipment:
    """Trace a preset in a mode anew, and return the shipment."""
    request = Request(model=model)
    described, notes = pool.ask([AskFacts(request), AskCheck(request)])
    longest = described.max_positions or request.seq_len
    request = replace(request, seq_len=longest) if longest < request.seq_len else request
    facts = replace(described, notes=notes)
    traces: dict[str, msgspec.Raw] = {}
    same: dict[str, str] = {}
    names: dict[bytes, str] = {}  # most classes of cards share their traces
    asked = [question for capability in CLASSES for question in questions(request, facts, mode, capability)]
    for question, answer in zip(asked, pool.attempt(asked), strict=True):
        if isinstance(answer, FrugalError):  # such as a tiled loss that the model cannot take
            continue
        data, name = msgspec.json.encode(answer), shipped._name(question)
        if names.setdefault(data, name) == name:
            traces[name] = msgspec.Raw(data)
        else:
            same[name] = names[data]
    return shipped.Shipment(shipped._versions(), shipped._definition(model), facts, traces, same)


def questions(
    request: Request, facts: ModelFacts, mode: ActivationCheckpointing, capability: Capability
) -> Iterator[AskTrace]:
    """Yield the ways to run a model on a class of cards that a plan may ask for."""
    for stage in (2, 3):
        for loss in ("plain", "tiled") if facts.can_tile else ("plain",):
            yield AskTrace(
                request=request,
                activation_checkpointing=mode,
                loss=loss,
                zero_stage=stage,
                kind="cuda",
                capability=capability,
            )


def main() -> None:
    """Make the shipments of the presets named on the command line, or of all."""
    shipped.FOLDER.mkdir(exist_ok=True)
    for model in sys.argv[1:] or presets():
        with closing(Pool(2)) as pool:
            for mode in shipped.MODES:
                shipment = make(model, mode, pool)
                path = shipped.FOLDER / f"{model}-{mode}.json.xz"
                path.write_bytes(lzma.compress(msgspec.json.encode(shipment), preset=9))
                sys.stderr.write(f"{path.name}: {len(shipment.traces)} traces, {path.stat().st_size >> 10} KiB\n")


if __name__ == "__main__":
    main()
