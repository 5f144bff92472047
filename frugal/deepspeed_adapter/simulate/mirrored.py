"""The functions of DeepSpeed that ours repeat, with digests of their sources: is what is simulated what is there?

No torch and no DeepSpeed here: sources are read as text.
"""

import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from frugal.errors import logger

_ENGINE = "engine:DeepSpeedEngine"
_ZERO12 = "zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_ZERO3 = "zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_COORDINATOR = "zero.partitioned_param_coordinator:PartitionedParameterCoordinator"
_OFFLOAD = "zero.parameter_offload:DeepSpeedZeRoOffload"
_INIT = "zero.partition_parameters:Init"


@dataclass(frozen=True)
class Mirrored:
    """A function or class of DeepSpeed that ours repeat.

    Attributes:
        place: `module:Class` or `module`, below `deepspeed.runtime`.
        name: in it.
        ours: what repeats it, below `frugal.deepspeed_adapter`.
        digest: the first 16 digits of the SHA-256 of its source.
    """

    place: str
    name: str
    ours: str
    digest: str

    @property
    def qualified(self) -> str:
        """`Class.method`."""
        owner = self.place.partition(":")[2]
        return f"{owner}.{self.name}" if owner else self.name

    def source(self, folder: Path) -> str | None:
        """Return its source in a package's folder; None: it is not there."""
        path = folder.joinpath("runtime", *self.place.partition(":")[0].split(".")).with_suffix(".py")
        lines, heads = _module(path)
        if self.qualified not in heads:
            return None
        begin = heads[self.qualified]
        indent = len(lines[begin]) - len(lines[begin].lstrip())
        end = begin + 1
        while begin and lines[begin - 1].startswith(" " * indent + "@"):
            begin -= 1
        # Deeper lines belong to it, as blank lines, comments and closing brackets do.
        while end < len(lines) and (lines[end][: indent + 1].isspace() or lines[end].lstrip()[:1] in ("", "#", ")")):
            end += 1
        while not lines[end - 1][: indent + 1].isspace() or lines[end - 1].isspace():  # what comes before the next
            end -= 1
        return "".join(lines[begin:end])


def _mirrored(place: str, ours: str, **digests: str) -> tuple[Mirrored, ...]:
    return tuple(Mirrored(place, name, ours, digest) for name, digest in digests.items())


MIRRORED = (
    *_mirrored(
        _ENGINE,
        "simulate.engine.SimulatedZero0",
        _get_gradients_for_reduction="e27ed4e775d9fe60",
        _reduce_non_expert_gradients="673162100f8ae969",
        buffered_allreduce_fallback="c36145108c4f0383",
        allreduce_no_retain="43b98414d6dd1981",
        allreduce_and_copy="c0e79d05e23df2fa",
        allreduce_bucket="aee7bd807e948276",
    ),
    *_mirrored(
        "zero.utils",
        "simulate.stream.Stream.norm",
        get_norm_dtype="0689d2a104ef0dfe",
    ),
    *_mirrored(
        "zero.utils",
        "simulate.zero3.SimulatedZero3.initialise",
        defragment="3882c6720522a8ca",
    ),
    *_mirrored(
        _ZERO12,
        "simulate.zero12.SimulatedZero12",
        __init__="faa9fe03f2209e81",
        flatten_dense_tensors_aligned="44340008fb354023",
        initialize_optimizer_states="9c439b900537afa5",
        setup_buckets="82266aa4880f7d64",
        process_gradients="a05fe9cac73c6432",
        reduce_independent_p_g_buckets_and_remove_grads="500839d3f30cd91b",
        reduce_ipg_grads="a41525b603f11247",
        average_tensor="6fd000d730e51e62",
        allreduce_and_copy_with_multiple_ranks="e826693368e39b53",
        allreduce_and_copy="1db38d57186c09f4",
        allreduce_bucket="bf7fd5c84c68e1f9",
        copy_grads_in_partition="110f723937b99fb9",
        _use_compact_grad_partition_buffer="b4b53eb20083e540",
        _build_compact_grad_partition_buffer="54c896878ee928ae",
        _add_full_reduction_to_compact_grad_partition="ce2bb0efd6197110",
        async_accumulate_grad_in_cpu_via_gpu="8d3c25962356b40e",
        async_inplace_copy_grad_to_fp32_buffer_from_gpu="e9891e46ba4ae96f",
        set_norm_for_param_grad_in_gpu="f955514898b2fc92",
        independent_gradient_partition_epilogue="26ceef6d75b34b97",
        finalize_gradient_accumulation_boundary="92863a666a499cc4",
        get_flat_partition="77f7f3dae63109ec",
        get_grad_norm_direct="72af0993ad8cde2c",
        scaled_global_norm="63c6a6fe100c4e49",
        step="9520884fd916d178",
        unscale_and_clip_grads="6bf2ce6f97eafcc2",
        update_lp_params="3cdce069e3c66082",
        _release_ipg_buffers="e344b6e31fec8a6f",
    ),
    *_mirrored(
        _ZERO3,
        "simulate.zero3.SimulatedZero3",
        _setup_for_real_optimizer="501df2275cc2960c",
        _create_fp16_partitions_with_defragmentation="db96601fe155bc96",
        _create_fp16_sub_groups="f6d2d2f11751344c",
        _create_fp32_partitions="2d22754c23f57f29",
        initialize_optimizer_states="e7929e87483515f8",
        reduce_independent_p_g_buckets_and_remove_grads="d62b56503afc1ebe",
        __add_grad_to_ipg_bucket="94d52f5b4af961a2",
        __reduce_and_partition_ipg_grads="24d09d54e4e6c38d",
        __avg_scatter_grads="f392cb14952e5019",
        __avg_scatter_contiguous_grads="0b21923022a45477",
        partition_grads="93119b25314ec6d3",
        independent_gradient_partition_epilogue="f1575b87b3d6c083",
        _optimizer_step="35f8511bba5ff760",
        _pre_step="6a560fa097ab03bb",
        _get_norm_groups="6a068faa3149b1f4",
        _prepare_fp32_grad_for_sub_group="6c19570c775487ef",
        step="c751b3209f83d3b9",
        _post_step="d993f8fa66f06633",
    ),
    *_mirrored(
        _COORDINATOR,
        "simulate.zero3.SimulatedPrefetch",
        reset_step="f992bb62cc9efb34",
        record_module="4169b2334f29a4fd",
        record_parameters="182696f0317dcd88",
        construct_parameter_trace_from_module_trace="6e8586f348a867ea",
        fetch_sub_module="a5abaed0971c8fbd",
        _fetch_sub_module_impl="5a0c0616eaa0b4a6",
        release_sub_module="c3e9bb9e6ae99872",
        release_and_reset_all="dba16cef435ceb5e",
        release_backward_leftovers="aabbdf4e2f6399c3",
        __all_gather_params="83c9b64e3d5ce27d",
        __all_gather_params_="4833cf1eeb2b7d8c",
        __release_param="cd752be64275c3b9",
        __params_to_release="a8a708d6d0c4b820",
    ),
    *_mirrored(
        _OFFLOAD,
        "simulate.zero3.SimulatedPrefetch",
        mark_persistent_parameters="c01f8b416681da4a",
    ),
    *_mirrored(
        _INIT,
        "simulate.zero3.SimulatedZero3.initialise",
        _zero_init_param="2930fbd6b94e89a5",
        _convert_to_deepspeed_param="77281d2526a148fb",
    ),
    *_mirrored(
        _OFFLOAD,
        "zero3_graph._Module",
        setup_zero_stage3_hooks="1ec65cef74df86a1",
        _register_deepspeed_module="05081f6e841fa219",
        pre_sub_module_forward_function="62abffd323b9210b",
        post_sub_module_forward_function="d40be41e270767a7",
        pre_sub_module_backward_function="6ae14ac34ac66ee9",
        post_sub_module_backward_function="4faa3ff85e4f749e",
    ),
    *_mirrored(
        "zero.partition_parameters:AllGatherCoalescedHandle",
        "zero3_graph._wait",
        wait="66e20af5df511a69",
    ),
    *_mirrored(
        "comm.coalesced_collectives",
        "zero3_graph._reduce_scatter_coalesced",
        reduce_scatter_coalesced="d05c7b944514f710",
    ),
    *_mirrored(
        "zero.partition_parameters",
        "simulate.fake_device.SideStreams",
        free_param="96cebaaa66079050",
    ),
)
"""A change here has to be looked at: ours may have to change with it."""


def verify_simulation() -> bool:
    """Return whether the installed DeepSpeed is the one that is simulated; if not, warn once. Imports nothing."""
    return _is_simulated(package_folder())


@functools.cache  # some 15 ms, once a process
def _is_simulated(folder: Path) -> bool:
    different = changed(folder, "simulate.") + changed(folder, "zero3_graph.")  # traces rest on the second
    if different:
        names = [each.qualified for each in different[:3]]
        if len(different) > 3:
            names.append("...")
        logger.warning(
            "DeepSpeed %s is not what is simulated, so all strategies are dry-run, which takes longer: %s changed",
            version("deepspeed"),
            ", ".join(names),
        )
    return not different


def changed(folder: Path, ours: str = "") -> list[Mirrored]:
    """Return what differs in a package's folder from what ours repeat, of names of ours that begin with `ours`."""
    return [each for each in MIRRORED if each.ours.startswith(ours) and _digest(each.source(folder)) != each.digest]


@functools.cache
def package_folder() -> Path:
    """Return where DeepSpeed is installed, without importing it."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def _module(path: Path) -> tuple[list[str], dict[str, int]]:
    """Return a module's lines, and where its classes, functions and methods (`Class.method`) begin.

    Found by indentation: a parser takes a second for the modules that are simulated.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    heads: dict[str, int] = {}
    owner = ""
    for number, line in enumerate(lines):
        if line.startswith(("def ", "class ", "    def ")):
            name = re.split(r"\W", line.lstrip(), maxsplit=2)[1]
            if not line.startswith(" "):
                owner = name
            heads[f"{owner}.{name}" if line.startswith(" ") else name] = number
    return lines, heads


def _digest(source: str | None) -> str:
    return "" if source is None else hashlib.sha256(source.encode()).hexdigest()[:16]


def changes(folder: Path, before: Path | None = None) -> Iterator[str]:
    """Yield for each function in `folder` that differs from what ours repeat how it changed.

    With the folder `before` of the package that ours repeat, also how it differs.
    """
    import difflib  # a plan does not wait for it

    for each in changed(folder):
        name, source = f"deepspeed.runtime.{each.place.partition(':')[0]}.{each.qualified}", each.source(folder)
        if source is None:
            yield f"{name} is gone; see {each.ours}"
            continue
        told = [f"{name} changed, its digest is {_digest(source)}; see {each.ours}"]
        if before is not None:
            old = (each.source(before) or "").splitlines()
            told += difflib.unified_diff(old, source.splitlines(), "tested", "installed", lineterm="")
        yield "\n".join(told)
