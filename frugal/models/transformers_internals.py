"""Names of transformers beyond its documented interface: nothing else uses them. They are checked before a model is
resolved or built, those of quantising when it is."""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from torch import nn

from frugal import required
from frugal.required import needed

NAMES = (
    *needed(
        "transformers.masking_utils", "attention masks are always used",
        "sdpa_mask:allow_is_bidirectional_skip", "eager_mask:allow_is_bidirectional_skip",
    ),
    *needed(
        "transformers.masking_utils:AttentionMaskInterface", "loops without frugal's engine have masks of their own",
        "_global_mapping",
    ),
    *needed("transformers.masking_utils", "packed documents", "find_packed_sequence_indices(position_ids)"),
    *needed(
        "transformers.modeling_utils:PreTrainedModel", "how a layer is recomputed",
        "_set_gradient_checkpointing:_gradient_checkpointing_func",
    ),
    *needed(
        "transformers.modeling_layers:GradientCheckpointingLayer", "which layers recompute", "gradient_checkpointing"
    ),
    *needed(
        "transformers.core_model_loading", "weights are read one by one, and each goes where it is trained",
        "spawn_materialize(thread_pool, tensor, device, dtype, sharding_op, tensor_idx)",
        "set_param_for_module(model, target_name, param_value, loading_info, hf_quantizer)",
    ),
    *needed(
        "transformers.modeling_utils", "weights are read one by one",
        "PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys)",
        "PreTrainedModel._finalize_model_loading(model, load_config, loading_info)",
        "PreTrainedModel.all_tied_weights_keys",
    ),
)  # fmt: skip
QUANTISING = needed(
    "transformers.integrations.bitsandbytes",
    "weights are quantised on the device that trains them",
    "Bnb4bitQuantize.convert(self, input_dict, full_layer_name, model, kwargs)",
)


@functools.cache
def _verify(table: tuple[required.Required, ...]) -> None:
    required.verify("transformers", table)


def always_use() -> None:
    """Make transformers use every padding mask it is given; for all models of this process.

    transformers leaves the mask of a bidirectional model out when it finds no padding in a batch, so that attention
    takes another kernel: more or less memory from one micro-batch to the next, a look at the device's data in every
    forward, and nothing a dry run without data could foresee. Here a mask that is passed is used, through the
    documented interface for mask functions (https://huggingface.co/docs/transformers/attention_interface) and an option
    that is not documented. Causal masks are not touched.
    """
    _verify(NAMES)
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    for name, make_mask in (("sdpa", sdpa_mask), ("eager", eager_mask)):

        def with_padding(*args: Any, make_mask: Any = make_mask, attention_mask: Any = None, **options: Any) -> Any:
            if attention_mask is not None:
                options["allow_is_bidirectional_skip"] = False
            for length in ("q_length", "kv_length") if _num_parts > 1 else ():
                options[length] *= _num_parts
            make = functools.partial(make_mask, *args, attention_mask=attention_mask, **options)
            within = getattr(options.get("mask_function"), _WITHIN, None)
            if _lazy is None or within is None or attention_mask is not None or make_mask is not sdpa_mask:
                return make()
            return _lazy(make, within, options)

        AttentionMaskInterface.register(name, with_padding)


def as_imported() -> AbstractContextManager[Any]:
    """Have transformers make masks as without `always_use` inside the `with` block: a loop without frugal's engine may
    follow one with it in this process."""
    masking = sys.modules.get("transformers.masking_utils")
    return nullcontext() if masking is None else patch.dict(
        masking.AttentionMaskInterface._global_mapping, sdpa=masking.sdpa_mask, eager=masking.eager_mask
    )  # fmt: skip


_WITHIN = "frugal_within_documents"
"""The attribute of a mask function of packs: the mask function before documents were kept apart."""

_lazy: Callable[..., Any] | None = None
"""A function that makes masks of the running forward, see `packed_documents`."""


@contextmanager
def packed_documents(numbers: Callable[[Any], Any], lazy: Callable[..., Any] | None = None) -> Iterator[None]:
    """Have models called inside the block learn the document of each token from `numbers(position_ids)`.

    `lazy(make, within, options)` returns their masks for `sdpa`: `make()` makes one, `within` is transformers' mask
    function without documents, `options` what it makes the mask of. transformers before 5.23 never calls it.
    """
    from transformers import masking_utils

    kept_apart = getattr(masking_utils, "packed_sequence_compatibility_function", None)

    def marked(within: Callable[..., Any], *rest: Any) -> Any:
        assert kept_apart is not None
        mask_function = kept_apart(within, *rest)
        setattr(mask_function, _WITHIN, within)
        return mask_function

    with (
        patch.object(masking_utils, "find_packed_sequence_indices", numbers),
        patch.object(masking_utils, "packed_sequence_compatibility_function", marked, create=True),
        patch(f"{__name__}._lazy", lazy),
    ):
        yield


_num_parts = 1
"""The number of parts into which sequences of the running forward are split."""


@contextmanager
def masks_of_whole_sequences(num_parts: int, positions: Any, documents: Any) -> Iterator[None]:
    """Have models called inside the block with one of `num_parts` of each sequence make the masks of the whole.

    `positions`, `documents (samples, positions)`: of packs those of each token of the whole; None: nothing is packed.
    """
    from transformers import masking_utils

    # Before 5.23 masks count positions from the beginning of a row, and are of the whole row already.
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", lambda mask, _positions: mask)
    with (
        packed_documents(lambda _positions_of_part: documents),
        patch.object(
            masking_utils,
            "remap_positions_for_packed_sequence",
            lambda mask, _positions_of_part: remap(mask, positions),
            create=True,
        ),
        patch(f"{__name__}._num_parts", num_parts),
    ):
        yield


def attention_by(name: str, run: Callable[..., Any]) -> None:
    """Have attention of this name (https://huggingface.co/docs/transformers/attention_interface) go through `run`, in
    all models of this process. It gets the function that would run otherwise first, and then what that gets."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    inner = ALL_ATTENTION_FUNCTIONS[name]
    runs = getattr(inner, "runs", ())
    if run in runs:
        return

    @functools.wraps(inner)
    def through(*args: Any, **options: Any) -> Any:
        return run(inner, *args, **options)

    through.runs = (*runs, run)  # type: ignore[attr-defined]  # a mark
    AttentionInterface.register(name, through)


def checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """Return the outermost layers of a transformers model that can be recomputed one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not any(name.startswith(f"{outer}.") for outer in layers):
            layers[name] = module
    return list(layers.values())


def recompute_layers(
    model: nn.Module, runs: Sequence[Callable[..., Any] | None], others: Callable[..., Any] | None
) -> bool:
    """Have each of `checkpointed_layers` of a model whose checkpointing is on be run by its own of `runs`, None: as if
    it were off; and what recomputes beside them by `others`. Whether there was anything."""
    recomputing = [module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")]
    for module in recomputing:
        module._gradient_checkpointing_func = others  # type: ignore[assignment]  # a function, not a module
    for layer, run in zip(checkpointed_layers(model), runs, strict=True):
        for module in layer.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = run is not None  # type: ignore[assignment]  # a switch, not a module
                module._gradient_checkpointing_func = run  # type: ignore[assignment]  # a function, not a module
    return bool(recomputing)


@contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """Have a transformers model return no keys and values: no plan counts those of all layers at once.

    Under activation checkpointing it keeps none in training anyway.
    """
    config: Any = getattr(module, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else None
    with ExitStack() as stack:
        for part in (config, text):
            if getattr(part, "use_cache", None) is True:
                stack.enter_context(patch.object(part, "use_cache", False))
        yield


@contextmanager
def reading(
    stored: Callable[[Any], Any],
    arrived: Callable[[Any, str], None],
    finish: Callable[[Any, Any], None] | None = None,
) -> Iterator[None]:
    """Have `from_pretrained` inside the `with` block read one tensor after the other, each when it is needed.

    `stored` makes of files the tensors in them by name, or objects that are read when they are indexed. `arrived` is
    called with the model and the name of each parameter and buffer that has got its values; `finish` with the model and
    the names that no file had, once all are read.
    """
    from transformers import core_model_loading
    from transformers.modeling_utils import PreTrainedModel

    load, materialize = PreTrainedModel._load_pretrained_model, core_model_loading.spawn_materialize
    put, complete = core_model_loading.set_param_for_module, PreTrainedModel._finalize_model_loading

    def load_from_stored(model: Any, state_dict: Any, checkpoint_files: Any, *rest: Any, **options: Any) -> Any:
        state_dict = stored(checkpoint_files) if state_dict is None and checkpoint_files else state_dict
        return load(model, state_dict, checkpoint_files, *rest, **options)

    def put_and_tell(model: Any, target_name: str, *rest: Any) -> None:
        put(model, target_name, *rest)
        owner, _, name = target_name.rpartition(".")
        kept = model.get_submodule(owner)
        value = kept._parameters.get(name, kept._buffers.get(name))
        if value is not None and getattr(value, "_is_hf_initialized", False):
            arrived(model, target_name)

    def finish_and_complete(model: Any, load_config: Any, loading_info: Any) -> Any:
        if finish is not None:
            finish(model, loading_info.missing_keys)
        return complete(model, load_config, loading_info)

    with (
        patch.object(PreTrainedModel, "_finalize_model_loading", staticmethod(finish_and_complete)),
        patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(load_from_stored)),
        patch.object(  # no threads: when it is needed
            core_model_loading,
            "spawn_materialize",
            lambda _threads, tensor, _device, dtype, **options: materialize(None, tensor, None, dtype, **options),
        ),
        patch.object(core_model_loading, "set_param_for_module", put_and_tell),
    ):
        yield


def quantising(device: Any, pack: Callable[[Any, Any], Any]) -> AbstractContextManager[Any]:
    """Move weights that `from_pretrained` quantises inside the block to `device` first; `pack` takes each as it
    was read, and its module, and returns what is set; bitsandbytes packs none on meta."""
    _verify(QUANTISING)
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize

    def convert(_self: Any, input_dict: Any, *_: Any, model: Any, **_options: Any) -> Any:
        packed = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            module = model.get_submodule(name.rpartition(".")[0])
            packed[name] = pack(tensor if tensor.is_meta else tensor.to(device), module)
            module._is_hf_initialized = True
        return packed

    return patch.object(Bnb4bitQuantize, "convert", convert)
