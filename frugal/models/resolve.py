"""The meaning of `--model`.

A reference is, in this order: a preset (presets.toml), a transformers model type (its default configuration), a
factory `package.module:name` or `path/to/file.py:name`, the path of a config.json or of a model folder, a hub name.
"""

import ast
import difflib
import functools
import json
import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from frugal.config.request import Request
from frugal.errors import RequestError, failure, refuse
from frugal.models import factories
from frugal.models.objectives import example_in_words
from frugal.models.spec import OWN, TASKS, ModelSpec, classes_in, heads, max_positions_of

MOST_LAYERS = 10_000
OWN_MODEL = "docs/tutorials/own-model.md"
_TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "vocab.json", "vocab.txt", "tiktoken.model",
)  # fmt: skip
"""Files that a tokenizer leaves in a model's folder; any of them."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


def resolve_request(request: Request, *, num_labels: int | None = None) -> ModelSpec:
    """Return the model that a request names, quantised and with adapters as it asks for. Raises as `resolve`."""
    spec = resolve(request.model, request.task, num_labels=num_labels)
    return replace(spec, lora=request.lora, quantize=request.quantize)


def resolve(reference: str, task: str | None = None, *, num_labels: int | None = None) -> ModelSpec:
    """Return the model that `reference` names, for `task`; without a task, for what its architecture is for.

    `num_labels` counts the classes of sequence classification. Code that comes with a model never runs.

    Raises:
        RequestError: nothing has this name, its factory fails, or its architecture cannot do the task.
    """
    refuse((task not in (None, *TASKS), f"there is no task `{task}`", "", f"tasks are {', '.join(TASKS)}"))
    if reference in presets():
        preset = presets()[reference]
        config = transformers.CONFIG_MAPPING[preset["type"]].from_dict(dict(preset["config"]))
        return _from_config(reference, config, task or preset["task"], num_labels, kind_of_reference="preset")
    if reference in transformers.CONFIG_MAPPING:
        with failure(f"{reference} has no default configuration", hint="give the path of a config.json"):
            config = transformers.CONFIG_MAPPING[reference]()  # some defaults contradict each other
        return _from_config(reference, config, task, num_labels, kind_of_reference="model type")
    if ":" in reference and not Path(reference).exists():
        return _from_factory(reference, task)
    path = Path(reference).expanduser()
    if path.exists():
        return _from_path(reference, path, task, num_labels)
    refuse(
        (
            reference.startswith((".", "/", "~")) or path.suffix in (".json", ".py") or reference.count("/") > 1,
            f"there is no model at {reference}",
            "",
            "give a config.json, a model folder, or a preset such as gpt2",
        )
    )
    return _from_hub(reference, task, num_labels)


@functools.cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the models of presets.toml by name."""
    return tomllib.loads((Path(__file__).parent / "presets.toml").read_text())


def _refuse_inputs_and_packed_weights(reference: str, config: Any) -> None:
    """Refuse a model whose encoder reads something else than tokens, of which transformers has the decoder for text,
    and weights that are packed, which the plan would count as they were.

    Raises:
        RequestError: with what it reads, or what to give in its place.
    """
    for kind in classes_in("MODEL_MAPPING", config.model_type):
        reads = getattr(kind, "main_input_name", "input_ids")
        refuse(
            (
                reads != "input_ids",
                f"{reference} cannot be trained on text",
                f"{kind.__name__} reads `{reads}`; as a language model it would be its decoder alone",
                f"give a factory that returns the module and its objective, see {OWN_MODEL}",
            )
        )
    given = getattr(config, "quantization_config", None)
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    refuse(
        (
            method is not None,
            f"{reference} is quantised already",
            f"its configuration says that {method} has packed its weights",
            "give the model it was made of, with --lora r=16 --quantize nf4"
            if method == "bitsandbytes"
            else "give the model it was made of, or a config.json without `quantization_config` if it is unpacked",
        )
    )


def _tasks_of(model_type: str) -> list[str]:
    return [task for task in TASKS if heads(task, model_type)]


def _infer_task(config: Any) -> str | None:
    """Return what `config.architectures` says, otherwise the first task that fits the architecture."""
    architectures = getattr(config, "architectures", None)
    architectures = architectures if isinstance(architectures, list) else ()
    named = [_task_of_class(config.model_type, each) for each in architectures]
    possible = _tasks_of(config.model_type)
    preferred = ("seq2seq",) if config.is_encoder_decoder else ("masked-lm", "causal-lm", "seq2seq")
    return next((task for task in (*named, *preferred, *possible) if task in possible), None)


def _task_of_class(model_type: str, class_name: str) -> str | None:
    """Return the task that transformers has a class for, of models of this type."""
    tasks = ("seq2seq", "masked-lm", "causal-lm", "sequence-classification")
    named = (task for task in tasks if class_name in [each.__name__ for each in heads(task, model_type)])
    return next(named, None)


def _from_config(
    reference: str, config: Any, task: str | None, num_labels: int | None = None, **fields: Any
) -> ModelSpec:
    """Return the spec of a transformers configuration, which it may change; `fields` are other fields of the spec."""
    possible = _tasks_of(config.model_type)
    chosen = task or _infer_task(config)
    if chosen is None or chosen not in possible:
        raise RequestError(
            f"{reference} cannot be trained as {chosen}" if chosen else f"{reference} cannot be trained on text",
            because=f"transformers has {' and '.join(possible) or 'no such model'} for `{config.model_type}`",
            hint=f"use --task {possible[0]}"
            if possible
            else f"give a factory that returns a module and its objective, see {OWN_MODEL}",
        )
    _refuse_inputs_and_packed_weights(reference, config)
    hint = f"give a factory that returns the module and its objective, see {OWN_MODEL}"
    with failure(f"{reference} is no single model for text", ValueError, hint=hint):
        text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    refuse(
        (
            isinstance(layers, int) and layers > MOST_LAYERS,
            f"{reference} has {layers} layers",
            f"building more than {MOST_LAYERS} one by one does not end",
            None,
        )
    )
    uses_cache = getattr(text, "use_cache", None)
    for part in (config, text):
        if getattr(part, "use_cache", False):
            part.use_cache = False
        if chosen == "sequence-classification" and getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0  # decoders look for the last token that is no padding
    if chosen == "sequence-classification" and num_labels is not None:
        config.num_labels = num_labels
    return ModelSpec(
        reference=reference,
        task=chosen,
        max_positions=max_positions_of(config),
        vocab_size=getattr(text, "vocab_size", None),
        config=config,
        uses_cache=uses_cache,
        layer_drop=_without_layer_drop(config),
        **{"kind_of_reference": "configuration", **fields},
    )


def _without_layer_drop(config: Any) -> tuple[tuple[str, float], ...]:
    """Set a configuration's LayerDrop to 0 (https://arxiv.org/abs/1909.11556); return the settings that were not.

    Ranks draw from generators of their own, so that they would train different layers in the same micro-step. ZeRO-2
    and 3 reduce gradients in the order in which they arrive, and would mix those of different parameters.
    """
    changed = []
    parts = (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ())))
    for part in {id(part): part for part in parts if part is not None}.values():
        for name, value in list(vars(part).items()):
            if "layerdrop" in name and isinstance(value, float | int) and value > 0:
                changed.append((name, float(value)))
                setattr(part, name, 0.0)
    return tuple(changed)


def _from_path(reference: str, path: Path, task: str | None, num_labels: int | None) -> ModelSpec:
    file = path / "config.json" if path.is_dir() else path
    with failure(f"{reference} is no model folder, {file} cannot be read", OSError):
        text = file.read_bytes()
    if file.suffix == ".py":
        with failure(f"{reference} cannot be read as Python", SyntaxError, ValueError):
            tree = ast.parse(text)  # not run
        made = [each.name for kind in (ast.FunctionDef, ast.ClassDef) for each in tree.body if isinstance(each, kind)]
        raise RequestError(
            f"{reference} does not say which function makes the model",
            because=f"it defines {', '.join(made) or 'no function or class'}",
            hint=f"name the one that returns a module: --model {reference}:{next(iter(made), 'FUNCTION')}",
        )
    with failure(f"{file} is no JSON", ValueError, RecursionError, hint="give a config.json, or FILE.py:FUNCTION"):
        # transformers writes infinity as `{"__float__": "Infinity"}`
        raw = json.loads(text, object_hook=lambda each: float(each["__float__"]) if [*each] == ["__float__"] else each)
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(model_type, str):
        raise RequestError(
            f"{file} is not a model's configuration",
            because="it has no `model_type`",
            hint='add one that transformers knows, such as "model_type": "gpt2"',
        )
    weights = str(path) if path.is_dir() and any(any(path.glob(pattern)) for pattern in _WEIGHTS) else None
    if model_type not in transformers.CONFIG_MAPPING:
        raise RequestError(
            f"transformers does not know the model type `{model_type}` of {file}",
            because="frugal never runs the code that comes with a model" if raw.get("auto_map") else (),
            hint=_similar(model_type, transformers.CONFIG_MAPPING),
        )
    with failure(f"{file} is not a model's configuration"):  # configurations check their values each in its own way
        config = transformers.CONFIG_MAPPING[model_type].from_dict(raw)
    own_tokenizer = str(file.parent) if any((file.parent / name).exists() for name in _TOKENIZERS) else None
    return _from_config(reference, config, task, num_labels, weights=weights, own_tokenizer=own_tokenizer)


def _from_hub(reference: str, task: str | None, num_labels: int | None) -> ModelSpec:
    try:
        config = transformers.AutoConfig.from_pretrained(
            reference, trust_remote_code=False, local_files_only=factories.hub_unreachable_because() is not None
        )
    except (OSError, ValueError) as error:
        raise RequestError(
            f"there is no model `{reference}`",
            because=(
                "it is no preset, no transformers model type, no path and no factory",
                factories.why_hub_failed(error),
            ),
            hint=_similar(reference.rpartition("/")[2], presets(), transformers.CONFIG_MAPPING),
        ) from None
    return _from_config(reference, config, task, num_labels, weights=reference, own_tokenizer=reference)


def _similar(name: str, *known: Collection[str]) -> str:
    """Return a hint with the closest names of the first that has some, otherwise with what else could be given."""
    for names in known:
        if matches := difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.6):
            return f"did you mean {' or '.join(matches)}?"
    return "give a preset such as gpt2 or llama-3.1-8b, a config.json, a model folder, or package.module:factory"


def _from_factory(reference: str, task: str | None) -> ModelSpec:
    """Return the spec of a user's factory, called once on meta to see what it makes."""
    factory = factories.import_callable(reference)
    module, objective = factories.make_model(reference, factory, torch.device("meta"))
    made: Any = module
    config = getattr(module, "config", None)
    is_transformers = hasattr(config, "get_text_config")
    if objective is None and task is None:
        inner = made.get_base_model() if hasattr(made, "get_base_model") else made  # peft's wrapper
        task = _task_of_class(getattr(getattr(inner, "config", None), "model_type", ""), type(inner).__name__)
        if task is None:
            raise RequestError(
                f"{reference} makes a {type(module).__name__}, but does not say how to train it",
                hint=f"return module, {example_in_words(module)} where forward returns the mean loss: a "
                f"sample of the largest size; otherwise module, frugal.SummedLoss(loss, example=...); see {OWN_MODEL}",
            )
    embedding = None
    with suppress(AttributeError, NotImplementedError):  # a model of transformers that reads no tokens, as of images
        embedding = made.get_input_embeddings() if is_transformers else None
    with failure(
        f"{reference} returned a module with parameters that have no shape",
        hint="call the module once before it is returned, on torch.zeros(SHAPE), or name the sizes",
    ):
        shapes = [(name, tuple(tensor.shape), tensor.requires_grad) for name, tensor in module.named_parameters()]
    return ModelSpec(
        reference=reference,
        task=OWN if objective is not None else str(task),
        max_positions=max_positions_of(config) if is_transformers else None,
        vocab_size=embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None,
        config=config if is_transformers else None,
        factory=factory,
        structure=f"{module!r}\n{shapes}",
        own_objective=objective,
    )
