"""What `--model` may say, and the module it stands for.

A reference is, in this order: a preset (presets.toml), a transformers model type (its default configuration), a
factory `package.module:name` or `path/to/file.py:name`, the path of a config.json or of a model folder, a hub name.
"""

import difflib
import functools
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from frugal.errors import RequestError
from frugal.planning.request import Task
from frugal.training import factories, hub, padding_masks
from frugal.training.loss import CausalLM, MaskedLM, Objective, Seq2Seq, SequenceClassification

TASKS: tuple[str, ...] = get_args(Task)
OWN = "own"  # the task of a factory that brings its own objective

_AUTO = {
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked-lm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "sequence-classification": (
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
}
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
_CLASSES = ("id2label", "label2id", "num_labels")
_SPECIAL_IDS = (
    "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip
# Position ids of these begin after the padding id (fairseq's habit), so that many positions are never used.
_POSITIONS_AFTER_PADDING = {
    "roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "longformer", "xmod",
    "data2vec-text", "luke", "esm", "mpnet", "ibert",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model that can be built any number of times, for real or on meta.

    Attributes:
        reference: what the user wrote.
        task: one of `TASKS`, or `own` where a factory brings its objective.
        max_positions: tokens in the longest sample it can read; None: no limit.
        vocab_size: rows of the input embedding; None: it has none.
        config: transformers' configuration; None for a factory that makes another kind of module.
        weights: folder or hub name that the weights come from; None: random ones.
    """

    reference: str
    task: str
    max_positions: int | None
    vocab_size: int | None
    config: Any = None
    weights: str | None = None
    trust_remote_code: bool = False
    factory: factories.Factory | None = None
    structure: str = ""
    own_objective: Objective | None = None

    def fingerprint(self) -> str:
        """SHA-256 of everything that memory and training depend on: the architecture and the task.

        Neither the weights nor the ids of special tokens nor the number of classes are part of it.
        """
        if self.factory is None:
            config = {name: value for name, value in self.config.to_dict().items() if name not in _NOT_ARCHITECTURE}
            structure = json.dumps(config, sort_keys=True, default=str)
        else:
            structure = self.structure
        return hashlib.sha256(f"{self.task}\n{structure}".encode()).hexdigest()

    def build(self, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> nn.Module:
        """The module in training mode; the same seed gives the same weights. On `meta` it has shapes only.

        Raises:
            RequestError: its factory fails, or its weights cannot be read.
        """
        device = torch.device(device)
        padding_masks.always_use()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            if self.factory is not None:
                module, _ = factories.call(self.reference, self.factory, device)
                return module.to(dtype=dtype).train()
            import transformers

            auto = getattr(transformers, _AUTO[self.task][0])
            if self.weights is None or device.type == "meta":
                with torch.device(device):
                    module = auto.from_config(self.config, dtype=dtype, trust_remote_code=self.trust_remote_code)
                return module.train()
            try:
                module = auto.from_pretrained(
                    self.weights,
                    config=self.config,
                    dtype=dtype,
                    trust_remote_code=self.trust_remote_code,
                    local_files_only=not hub.reachable(),
                )
            except Exception as error:  # each file format fails in its own way
                raise RequestError(
                    f"the weights of {self.reference} cannot be loaded",
                    because=hub.first_line(error),
                    hint="to train from random weights give the path of its config.json",
                ) from None
            return module.to(device).train()

    def objective(self, tokenizer: Any = None, *, seed: int = 0, pack: bool = False) -> Objective:
        """What is trained; pads and masks with the tokenizer's special tokens, or with the configuration's.

        `seed` is for objectives that draw something: which tokens are masked. `pack`: several documents in a sample.
        """
        if self.own_objective is not None:
            return self.own_objective

        def special(name: str, otherwise: int) -> int:
            for owner in (tokenizer, self.config):
                if (token_id := getattr(owner, name, None)) is not None:
                    return int(token_id[0] if isinstance(token_id, list) else token_id)
            return otherwise

        pad_id = special("pad_token_id", 0)
        match self.task:
            case "causal-lm":
                return CausalLM(pad_id, packed=pack)
            case "masked-lm":
                vocabulary = self.vocab_size or 1
                return MaskedLM(
                    pad_id=pad_id,
                    mask_id=special("mask_token_id", vocabulary - 1),
                    vocab_size=vocabulary if tokenizer is None else len(tokenizer),
                    special_ids=() if tokenizer is None else tuple(tokenizer.all_special_ids),
                    seed=seed,
                )
            case "seq2seq":
                return Seq2Seq(pad_id, start_id=special("decoder_start_token_id", special("bos_token_id", pad_id)))
            case "sequence-classification":
                ends = self.config is not None and self.config.is_encoder_decoder
                end_id = special("eos_token_id", pad_id) if ends else None
                return SequenceClassification(pad_id, bidirectional=self._is_bidirectional(), end_id=end_id)
        raise AssertionError(self.task)

    def _is_bidirectional(self) -> bool:
        """Whether tokens see later ones, so that padding has to be masked."""
        return self.config is None or self.config.is_encoder_decoder or self.config.model_type in _heads("masked-lm")

    def for_tokenizer(self, tokenizer: Any) -> "ModelSpec":
        """The same model with the tokenizer's special tokens, as training from text needs it.

        Raises:
            RequestError: the tokenizer has ids that the model has no embedding for.
        """
        if self.vocab_size is not None and len(tokenizer) > self.vocab_size:
            raise RequestError(
                f"the tokenizer has {len(tokenizer)} tokens, {self.reference} has embeddings for {self.vocab_size}",
                hint="take the tokenizer that belongs to the model, or a config.json with a larger vocab_size",
            )
        if self.config is None or self.factory is not None:
            return self
        config = type(self.config).from_dict(self.config.to_dict())
        # Knowing the padding, a causal model would look for it in every batch, a wait for the device, only to warn.
        padding = () if self.task == "causal-lm" else ("pad_token_id",)
        for name in (*padding, "bos_token_id", "eos_token_id"):
            if (token_id := getattr(tokenizer, name, None)) is not None:
                setattr(config, name, token_id)
        if config.is_encoder_decoder and tokenizer.pad_token_id is not None and self.weights is None:
            config.decoder_start_token_id = tokenizer.pad_token_id
        return replace(self, config=config, max_positions=_max_positions(config))

    def for_labels(self, num_labels: int) -> "ModelSpec":
        """The same model with at least `num_labels` classes; of use for sequence classification only."""
        if self.task != "sequence-classification" or self.factory is not None or self.config.num_labels >= num_labels:
            return self
        config = type(self.config).from_dict(self.config.to_dict())
        config.num_labels = num_labels
        return replace(self, config=config)


_NOT_ARCHITECTURE = {
    "transformers_version",
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    *_SPECIAL_IDS,
    *_CLASSES,
}


def resolve(
    reference: str, task: str | None = None, *, num_labels: int | None = None, trust_remote_code: bool = False
) -> ModelSpec:
    """The model that `reference` names, for `task`; without a task, what its architecture is for.

    `num_labels` counts the classes of sequence classification. Code that comes with a model runs only if
    `trust_remote_code`.

    Raises:
        RequestError: nothing has this name, its factory fails, or its architecture cannot do the task.
    """
    if task is not None and task not in TASKS:
        raise RequestError(f"there is no task `{task}`", hint=f"tasks are {', '.join(TASKS)}")
    if reference in presets():
        preset = presets()[reference]
        config = _config_class(preset["type"]).from_dict(dict(preset["config"]))
        return _of_config(reference, config, task or preset["task"], num_labels=num_labels)
    if reference in _model_types():
        return _of_config(reference, _config_class(reference)(), task, num_labels=num_labels)
    if ":" in reference and not Path(reference).exists():
        return _of_factory(reference, task)
    path = Path(reference).expanduser()
    if path.exists():
        return _of_path(reference, path, task, num_labels=num_labels, trust_remote_code=trust_remote_code)
    if reference.startswith((".", "/", "~")) or reference.endswith(".json") or reference.count("/") > 1:
        raise RequestError(
            f"there is no model at {reference}", hint="give a config.json, a model folder, or a preset such as gpt2"
        )
    return _of_hub(reference, task, num_labels=num_labels, trust_remote_code=trust_remote_code)


def check_sequence_length(spec: ModelSpec, seq_len: int) -> None:
    """Refuse samples that the model has no positions for.

    Raises:
        RequestError: `seq_len` tokens are more than its positions.
    """
    if spec.max_positions is not None and seq_len > spec.max_positions:
        raise RequestError(
            f"--seq-len {seq_len} is longer than {spec.reference} can read",
            because=f"it has {spec.max_positions} positions",
            hint=f"use --seq-len {spec.max_positions} or less",
        )


@functools.cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """The models of presets.toml by name."""
    return tomllib.loads((Path(__file__).parent / "presets.toml").read_text())


@functools.cache
def _model_types() -> Mapping[str, str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return CONFIG_MAPPING_NAMES


def _config_class(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


@functools.cache
def _heads(task: str) -> Mapping[str, Any]:
    """Model type -> class name (or names) of its model for `task`."""
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, _AUTO[task][1])


def _tasks_of(model_type: str) -> list[str]:
    return [task for task in TASKS if model_type in _heads(task)]


def _infer_task(config: Any) -> str | None:
    """What `config.architectures` says, otherwise the first task that fits the architecture."""
    for architecture in getattr(config, "architectures", None) or ():
        for task in ("seq2seq", "masked-lm", "causal-lm", "sequence-classification"):
            names = _heads(task).get(config.model_type, ())
            if architecture in ((names,) if isinstance(names, str) else names):
                return task
    possible = _tasks_of(config.model_type)
    preferred = ("seq2seq",) if config.is_encoder_decoder else ("masked-lm", "causal-lm", "seq2seq")
    return next((task for task in (*preferred, *possible) if task in possible), None)


def _of_config(
    reference: str,
    config: Any,
    task: str | None,
    *,
    num_labels: int | None = None,
    weights: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSpec:
    """The spec of a transformers configuration, which it may change."""
    own_code = trust_remote_code and bool(getattr(config, "auto_map", None))
    possible = list(TASKS) if own_code else _tasks_of(config.model_type)
    chosen = task or _infer_task(config) or ("causal-lm" if own_code else None)
    if chosen is None or chosen not in possible:
        raise RequestError(
            f"{reference} cannot be trained as {chosen}" if chosen else f"{reference} cannot be trained on text",
            because=f"transformers has {_listed(possible) if possible else 'no such model'} for `{config.model_type}`",
            hint=f"use --task {possible[0]}" if possible else "give a factory that returns a module and its objective",
        )
    text = config.get_text_config()
    for part in {id(config): config, id(text): text}.values():
        if getattr(part, "use_cache", False):
            part.use_cache = False
    if chosen == "sequence-classification":
        if num_labels is not None:
            config.num_labels = num_labels
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # decoders look for the last token that is no padding
    return ModelSpec(
        reference=reference,
        task=chosen,
        max_positions=_max_positions(config),
        vocab_size=getattr(text, "vocab_size", None),
        config=config,
        weights=weights,
        trust_remote_code=trust_remote_code,
    )


def _listed(tasks: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(tasks[:-1]), tasks[-1])))


def _max_positions(config: Any) -> int | None:
    """Tokens that the position embeddings reach; None where positions are relative."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    if text.model_type in _POSITIONS_AFTER_PADDING:
        return positions - (text.pad_token_id or 0) - 1
    return positions


def _of_path(
    reference: str, path: Path, task: str | None, *, num_labels: int | None, trust_remote_code: bool
) -> ModelSpec:
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{reference} is no model folder", because=f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise RequestError(f"{file} is not a model's configuration", because=f"it is no JSON: {error}") from None
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if model_type is None:
        raise RequestError(
            f"{file} is not a model's configuration",
            because="it has no `model_type`",
            hint='add one that transformers knows, such as "model_type": "gpt2"',
        )
    weights = str(path) if path.is_dir() and any(any(path.glob(pattern)) for pattern in _WEIGHTS) else None
    if raw.get("auto_map") and trust_remote_code:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(file.parent, trust_remote_code=True)
    elif model_type not in _model_types():
        raise RequestError(
            f"transformers does not know the model type `{model_type}` of {file}",
            because="the code that comes with a model runs only if asked" if raw.get("auto_map") else (),
            hint=_similar(model_type, _model_types()),
        )
    else:
        try:
            config = _config_class(model_type).from_dict(raw)
        except Exception as error:  # configurations check their values each in its own way
            raise RequestError(f"{file} is not a model's configuration", because=hub.first_line(error)) from None
    return _of_config(
        reference, config, task, num_labels=num_labels, weights=weights, trust_remote_code=trust_remote_code
    )


def _of_hub(reference: str, task: str | None, *, num_labels: int | None, trust_remote_code: bool) -> ModelSpec:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            reference, trust_remote_code=trust_remote_code, local_files_only=not hub.reachable()
        )
    except (OSError, ValueError) as error:
        raise RequestError(
            f"there is no model `{reference}`",
            because=("it is no preset, no transformers model type, no path and no factory", hub.why_not(error)),
            hint=_similar(reference.rpartition("/")[2], presets(), _model_types()),
        ) from None
    return _of_config(
        reference, config, task, num_labels=num_labels, weights=reference, trust_remote_code=trust_remote_code
    )


def _similar(name: str, *known: Mapping[str, Any]) -> str:
    """A hint with the closest names of the first that has some, otherwise what else could be given."""
    for names in known:
        if matches := difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.6):
            return f"did you mean {' or '.join(matches)}?"
    return "give a preset such as gpt2 or llama-3.1-8b, a config.json, a model folder, or package.module:factory"


def _of_factory(reference: str, task: str | None) -> ModelSpec:
    """The spec of a user's factory, called once on meta to see what it makes."""
    factory = factories.find(reference)
    module, objective = factories.call(reference, factory, torch.device("meta"))
    config = getattr(module, "config", None)
    is_transformers = hasattr(config, "get_text_config")
    if objective is None and task is None:
        task = _infer_task_of_class(module)
        if task is None:
            raise RequestError(
                f"{reference} makes a {type(module).__name__}, but does not say how to train it",
                hint="return (module, objective) from it; frugal.training.loss.SummedLoss makes one of a loss function",
            )
    embedding = getattr(module, "get_input_embeddings", lambda: None)() if is_transformers else None
    shapes = [(name, tuple(tensor.shape), tensor.requires_grad) for name, tensor in module.named_parameters()]
    return ModelSpec(
        reference=reference,
        task=OWN if objective is not None else str(task),
        max_positions=_max_positions(config) if is_transformers else None,
        vocab_size=embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None,
        config=config if is_transformers else None,
        factory=factory,
        structure=f"{module!r}\n{shapes}",
        own_objective=objective,
    )


def _infer_task_of_class(module: nn.Module) -> str | None:
    if hasattr(module, "get_base_model"):  # peft's wrapper
        module = module.get_base_model()  # type: ignore[operator]  # a method
    for task in ("seq2seq", "masked-lm", "causal-lm", "sequence-classification"):
        names = _heads(task).get(getattr(getattr(module, "config", None), "model_type", ""), ())
        if type(module).__name__ in ((names,) if isinstance(names, str) else names):
            return task
    return None
