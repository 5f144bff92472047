"""Traces that are shipped with frugal: those of the presets at their usual length, in bf16 on GPUs.

With them a preset is planned without building it first. They hold for the versions they were made with; with others
the model is traced here, as any model is. `python -m frugal.dryrun.shipped [PRESET ...]` makes them again.
"""

import functools
import logging
import lzma
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import structs

from frugal import files
from frugal.config.hardware.cluster import CARDS, Capability, kernel_class
from frugal.config.hardware.local_host import library_versions
from frugal.config.request import Request
from frugal.dryrun.cache import presets
from frugal.dryrun.messages import AskCheck, AskFacts, AskTrace, Traced
from frugal.dryrun.pool import Pool
from frugal.errors import FrugalError
from frugal.planning.model_facts import ModelFacts
from frugal.planning.strategy import ActivationCheckpointing

logger = logging.getLogger("frugal")

FOLDER = Path(__file__).parent / "shipped_traces"
CLASSES = sorted({kernel_class(card.compute_capability) for card in CARDS.values() if card.has_bf16})
MODES: tuple[ActivationCheckpointing, ...] = ("off", "selective", "full", "offloaded")  # those that `auto` tries


class Shipment(msgspec.Struct, frozen=True):
    """The shipped traces of one preset in one mode. `definition` is the preset's entry in the table.

    `same`: of a question that has the same trace as another, the other one: most classes of cards share theirs.
    """

    versions: tuple[str, ...]
    definition: str
    facts: ModelFacts
    traces: dict[str, msgspec.Raw]
    same: dict[str, str] = {}


def facts(request: Request) -> ModelFacts | None:
    """Return the facts of the request's model, if they are shipped."""
    is_plain = request.task is None and not request.pack and request.batch_norm is None and request.lora is None
    is_plain = is_plain and request.sequence_parallel in (None, 1)  # else it has to be tried first
    shipment = _shipment(request.model, "off") if is_plain else None
    return None if shipment is None else shipment.facts


def trace(question: AskTrace) -> Traced | None:
    """Return the answer to `question`, if it is shipped."""
    request = question.request
    if question.sequence_parallel > 1:
        return None
    if request.task is not None or request.pack or request.precision != "bf16" or request.lora is not None:
        return None
    shipment = _shipment(request.model, question.activation_checkpointing)
    if shipment is None:
        return None
    name = _name(question)
    raw = shipment.traces.get(shipment.same.get(name, name))
    return None if raw is None else msgspec.json.decode(raw, type=Traced)


@functools.lru_cache(maxsize=len(MODES))
def _shipment(model: str, mode: ActivationCheckpointing) -> Shipment | None:
    path = FOLDER / _file_name(model, mode)
    if model not in presets() or not path.is_file():
        return None
    try:
        shipment = msgspec.json.decode(lzma.decompress(files.read_regular(path)), type=Shipment)
    except (OSError, lzma.LZMAError, EOFError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("%s is damaged (%s): the model is traced here; installing frugal anew repairs it", path, error)
        return None
    return shipment if (shipment.versions, shipment.definition) == (_versions(), _definition(model)) else None


def _file_name(model: str, mode: ActivationCheckpointing) -> str:
    """Return a file's name. Each mode has its own file, because most plans need few modes."""
    return f"{model}-{mode}.json.xz"


def _definition(model: str) -> str:
    return msgspec.json.encode(presets()[model]).decode()


@functools.cache
def _versions() -> tuple[str, ...]:
    """Return the versions without the suffix of torch's build, which changes no trace."""
    installed = library_versions()
    return tuple(installed[name].partition("+")[0] for name in ("torch", "transformers"))


def _name(question: AskTrace) -> str:
    mode = [question.activation_checkpointing, question.loss, f"ZeRO-{question.zero_stage}", question.kind]
    mode += ["tiled MLP"] if question.mlp == "tiled" else []
    return " ".join([str(question.request.seq_len), *mode, "{}.{}".format(*question.capability)])


def make(model: str, mode: ActivationCheckpointing, pool: Pool) -> Shipment:
    """Trace a preset in a mode anew, and return the shipment."""
    request = Request(model=model)
    (described,) = pool.ask([AskFacts(request)])
    (checked,) = pool.ask([AskCheck(request)])
    assert described.describe is not None and checked.notes is not None
    longest = described.describe.max_positions or request.seq_len
    request = replace(request, seq_len=longest) if longest < request.seq_len else request
    facts = replace(described.describe, notes=checked.notes)
    traces: dict[str, msgspec.Raw] = {}
    same: dict[str, str] = {}
    for capability in CLASSES:
        questions = [each for each in _questions(request, facts, mode, capability) if _name(each) not in same]
        for question, answer in zip(questions, pool.attempt(questions), strict=True):
            if isinstance(answer, FrugalError):  # such as a tiled loss that the model cannot take
                continue
            assert answer.traced is not None
            name = _name(question)
            traces[name] = msgspec.Raw(msgspec.json.encode(answer.traced))
            alike = (_name(structs.replace(question, capability=each)) for each in answer.traced.alike)
            same.update((each, name) for each in alike if each != name)
    return Shipment(_versions(), _definition(model), facts, traces, same)


def _questions(
    request: Request, facts: ModelFacts, mode: ActivationCheckpointing, capability: Capability
) -> Iterator[AskTrace]:
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
    FOLDER.mkdir(exist_ok=True)
    for model in sys.argv[1:] or presets():
        with closing(Pool(2)) as pool:
            for mode in MODES:
                shipment = make(model, mode, pool)
                path = FOLDER / _file_name(model, mode)
                path.write_bytes(lzma.compress(msgspec.json.encode(shipment), preset=9))
                sys.stderr.write(f"{path.name}: {len(shipment.traces)} traces, {path.stat().st_size >> 10} KiB\n")


if __name__ == "__main__":
    main()
