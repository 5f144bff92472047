"""Traces that are shipped with frugal: those of the presets at their usual length, in bf16 on GPUs.

With them a preset is planned without building it first. They hold for the versions they were made with; with others
the model is traced here, as any model is. `python -m bench.planning.shipped [PRESET ...]` in a clone makes them again.
"""

import functools
import lzma
from pathlib import Path

import msgspec

from frugal import files
from frugal.config.hardware import local_host
from frugal.config.request import Request
from frugal.dryrun.cache import presets
from frugal.dryrun.messages import AskTrace, Traced
from frugal.errors import logger
from frugal.planning.model_facts import ModelFacts
from frugal.planning.strategy import ActivationCheckpointing

FOLDER = Path(__file__).parent / "shipped_traces"
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
    if question.sequence_parallel > 1 or question.kernels != "plain":
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
    path = FOLDER / f"{model}-{mode}.json.xz"  # one a mode: most plans need few
    if model not in presets() or not path.is_file():
        return None
    try:
        shipment = msgspec.json.decode(lzma.decompress(files.read_regular(path)), type=Shipment)
    except (OSError, lzma.LZMAError, EOFError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("%s is damaged (%s): the model is traced here; installing frugal anew repairs it", path, error)
        return None
    return shipment if (shipment.versions, shipment.definition) == (_versions(), _definition(model)) else None


def _definition(model: str) -> str:
    return msgspec.json.encode(presets()[model]).decode()


@functools.cache
def _versions() -> tuple[str, ...]:
    """Return the versions without the suffix of torch's build, which changes no trace."""
    installed = local_host.library_versions()
    return tuple(installed[name].partition("+")[0] for name in ("torch", "transformers"))


def _name(question: AskTrace) -> str:
    mode = [question.activation_checkpointing, question.loss, f"ZeRO-{question.zero_stage}", question.kind]
    mode += ["tiled MLP"] if question.mlp == "tiled" else []
    return " ".join([str(question.request.seq_len), *mode, "{}.{}".format(*question.capability)])
