"""A model that can be built any number of times, for real or on meta; `frugal.models.resolve` finds it."""

import copy
import functools
import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
import transformers
from torch import Tensor, nn

from frugal.config.adapters import Lora
from frugal.config.request import Quantization, Task
from frugal.config.sample_lengths import DOCUMENT_TOKENS
from frugal.errors import RequestError, failure, first_line, refuse
from frugal.models import adapters, expert_modules, factories, transformers_internals
from frugal.models.loading import quantised
from frugal.models.loading.weights import Place, load_weights, off_the_file
from frugal.models.losses import decoder_inputs, own_loss
from frugal.models.objectives import CausalLM, MaskedLM, Objective, Seq2Seq, SequenceClassification
from frugal.planning.model_facts import Origin

TASKS: tuple[str, ...] = get_args(Task)
OWN = "own"  # the task of a factory that brings its own objective

_AUTO = {
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    "masked-lm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    "sequence-classification": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),
}
_CASTS: dict[torch.dtype, Callable[[nn.Module], nn.Module]] = {
    torch.bfloat16: nn.Module.bfloat16, torch.float16: nn.Module.half, torch.float32: nn.Module.float,
}  # fmt: skip
"""Unlike `Module.to`, these keep the imaginary parts of complex numbers."""
_NOT_ARCHITECTURE = {
    "transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype",
    "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "id2label", "label2id", "num_labels",
}  # fmt: skip
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
        own_tokenizer: folder or hub name of the tokenizer that belongs to it; None: it has none.
        kind_of_reference: what `reference` is, in words, such as `preset`.
        lora: adapters that are trained instead of it; None: it is trained itself.
        quantize: in what the frozen weights under adapters are kept; None: in the run's precision.
        uses_cache: what its configuration says of `use_cache`, which is off while it trains.
        layer_drop: settings of LayerDrop that its configuration had, by which ranks would leave out different layers.
    """

    reference: str
    task: str
    max_positions: int | None
    vocab_size: int | None
    config: Any = None
    weights: str | None = None
    own_tokenizer: str | None = None
    kind_of_reference: str = "factory"
    uses_cache: bool | None = None
    layer_drop: tuple[tuple[str, float], ...] = ()
    factory: factories.Factory | None = None
    structure: str = ""
    own_objective: Objective | None = None
    lora: Lora | None = None
    quantize: Quantization | None = None

    @property
    def origin(self) -> Origin:
        """Return where its weights come from."""
        return "factory" if self.factory is not None else "random" if self.weights is None else "pretrained"

    def fingerprint(self) -> str:
        """Return the SHA-256 of all that memory and training depend on: the architecture and the task.

        Neither the weights nor the ids of special tokens nor the number of classes are part of it.
        """
        if self.factory is None:
            config = {name: value for name, value in self.config.to_dict().items() if name not in _NOT_ARCHITECTURE}
            structure = json.dumps(config, sort_keys=True, default=str)
        else:
            structure = self.structure
        adapter = "".join(f"\n{each}" for each in (self.lora, self.quantize) if each is not None)
        return hashlib.sha256(f"{self.task}\n{structure}{adapter}".encode()).hexdigest()

    def build(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        seed: int = 0,
        place: Place | None = None,
        adapting: AbstractContextManager[Any] | None = None,
        quantising_on: torch.device | None = None,
    ) -> nn.Module:
        """Build the module in training mode, with adapters; the same seed gives the same weights, `meta` only shapes.

        `place` is given each pretrained parameter as soon as it is read, so that it need not stay on the host. What is
        not pretrained is on `device`. `adapting` is open while adapters are put around what was placed.
        `quantising_on`: where weights that are placed are quantised, and their scales stay.

        Raises:
            RequestError: its factory fails, its weights cannot be read, or it cannot have these adapters.
        """
        device = torch.device(device)
        transformers_internals.always_use()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            module = self._base(dtype, device, place, quantising_on or device)
            expert_modules.always_run(module)
            if self.lora is not None:
                with adapting or nullcontext():
                    module = adapters.add(
                        module, self.lora, self.task, dtype=dtype, device=device, seed=seed, base=self.weights
                    )
        return module.train()

    def refuse_random_base(self) -> None:
        """Refuse to train adapters of nothing: what they add to random weights is of no use to anybody.

        A factory may bring weights of its own.

        Raises:
            RequestError: the model's weights are random, and would be frozen.
        """
        refuse(
            (
                self.lora is not None and self.origin == "random",
                "--lora would freeze random weights",
                f"{self.kind_of_reference} {self.reference} names an architecture without weights",
                "give a model folder or a hub name; `frugal plan` and `frugal measure` need no weights",
            )
        )

    def _base(
        self, dtype: torch.dtype, device: torch.device, place: Place | None, quantising_on: torch.device
    ) -> nn.Module:
        """Return the module without adapters. Raises as `build`."""
        if self.factory is None and self.weights is not None and device.type != "meta":
            module = self._pretrained(dtype, place or off_the_file, quantising_on)
            return module if place else module.to(device)
        if self.factory is not None:
            module, _ = factories.make_model(self.reference, self.factory, device)
            module = _CASTS[dtype](module)
        else:
            auto = getattr(transformers, _AUTO[self.task][0])
            # values that contradict each other, or are no numbers; each model fails in its way
            with failure(f"{self.reference} has a configuration that makes no model"), factories.on_device(device):
                module = auto.from_config(self._config_to_build(), dtype=dtype, trust_remote_code=False)
        if self.quantize is None:
            return module
        return quantised.apply(module, reference=self.reference, dtype=dtype)

    def _config_to_build(self) -> Any:
        """Return the configuration, or a copy where transformers writes into it what it quantises."""
        return self.config if self.quantize is None else copy.deepcopy(self.config)

    def reader(self, dtype: torch.dtype, *, may_download: bool = True) -> Callable[[], Any]:
        """Return transformers' `from_pretrained` with its arguments, for a model that has weights."""
        options: dict[str, Any] = {}
        if self.quantize is not None:
            options["quantization_config"] = quantised.config(dtype)
            options["device_map"] = {"": "cpu"}  # otherwise it warms up the allocator of a GPU
        return functools.partial(
            getattr(transformers, _AUTO[self.task][0]).from_pretrained,
            self.weights,
            config=self._config_to_build(),
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=not may_download or factories.hub_unreachable_because() is not None,
            output_loading_info=True,
            **options,
        )

    def _pretrained(self, dtype: torch.dtype, place: Place, quantising_on: torch.device) -> nn.Module:
        """Return the module with its saved weights; what they lack is random, see `random_weights`."""
        reader, quantising = self.reader(dtype), quantising_on if self.quantize is not None else None
        try:
            module, loaded, sizes = load_weights(reader, place, quantising_on=quantising)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # each file format fails in its own way
            raise RequestError(
                f"the weights of {self.reference} cannot be loaded",
                because=first_line(error),
                hint="to train from random weights give the path of its config.json",
            ) from None
        missing = set(loaded["missing_keys"])
        num_random = sum(size for name, size in sizes.items() if name in missing)
        refuse(
            (
                2 * num_random > sum(sizes.values()),
                f"the weights in {self.weights} are those of another model",
                f"of {sum(sizes.values()):,} parameters they lack {num_random:,}, such as {min(missing, default='')}",
                "to train from random weights give the path of its config.json",
            )
        )
        setattr(module, _RANDOM, tuple(sorted(missing & sizes.keys())))
        return quantised.settle(module)

    def objective(
        self, tokenizer: Any = None, *, seed: int = 0, pack: bool = False, document_tokens: int = DOCUMENT_TOKENS
    ) -> Objective:
        """Return the objective, which pads and masks with the tokenizer's special tokens, or the configuration's.

        `seed` is for objectives that draw something: which tokens are masked. `pack`: several documents in a sample, of
        `document_tokens` on average, or more; 0: attention takes masks.
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
                return CausalLM(pad_id, packed=pack, own_loss=self.has_own_loss(), document_tokens=document_tokens)
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
                start_id = special("decoder_start_token_id", special("bos_token_id", pad_id))
                make = self._decoder_inputs(pad_token_id=pad_id, decoder_start_token_id=start_id)
                return Seq2Seq(pad_id, start_id=start_id, decoder_inputs=make, own_loss=self.has_own_loss())
            case "sequence-classification":
                ends = self.config is not None and self.config.is_encoder_decoder
                end_id = special("eos_token_id", pad_id) if ends else None
                # where tokens see later ones, padding has to be masked
                bidirectional = self.config is None or ends or bool(heads("masked-lm", self.config.model_type))
                return SequenceClassification(pad_id, bidirectional=bidirectional, end_id=end_id)
        raise AssertionError(self.task)

    def has_own_loss(self) -> bool:
        """Return whether the model's own loss is trained, as it is more than the cross entropy of its logits."""
        return (
            self.task in ("causal-lm", "seq2seq")
            and self.config is not None
            and (self.config.model_type == "prophetnet" or own_loss.depends_on_split(self.config) is not None)
        )

    def _decoder_inputs(self, **special_ids: int) -> Callable[[Tensor], Tensor] | None:
        """Return a function from labels to decoder inputs, as the model's class makes them; None: it has no own way.

        `special_ids` stand where the configuration has none.
        """
        if self.config is None:
            return None
        config = copy.deepcopy(self.config)
        for name, token_id in special_ids.items():
            if getattr(config, name, None) is None:
                setattr(config, name, token_id)
        if self.factory is None:
            model_class = heads(self.task, config.model_type)[0]
        else:
            model: Any = self.build(dtype=torch.float32, device="meta")
            model_class = type(model.get_base_model() if hasattr(model, "get_base_model") else model)  # inside adapters
        return decoder_inputs.of_class(model_class, config)

    def for_tokenizer(self, tokenizer: Any) -> "ModelSpec":
        """Return the same model with the tokenizer's special tokens, as training from text needs it.

        A pretrained model keeps those that its configuration names.

        Raises:
            RequestError: the tokenizer has ids that the model has no embedding for.
        """
        refuse(
            (
                self.vocab_size is not None and len(tokenizer) > self.vocab_size,
                f"the tokenizer has {len(tokenizer)} tokens, {self.reference} has embeddings for {self.vocab_size}",
                "",
                "take the tokenizer that belongs to the model, or a config.json with a larger vocab_size",
            )
        )
        if self.config is None or self.factory is not None:
            return self
        config = type(self.config).from_dict(self.config.to_dict())
        # Knowing the padding, a causal model would look for it in every batch, a wait for the device, only to warn.
        padding = () if self.task == "causal-lm" else ("pad_token_id",)
        for name in (*padding, "bos_token_id", "eos_token_id"):
            is_given = self.weights is not None and getattr(config, name, None) is not None
            if not is_given and (token_id := getattr(tokenizer, name, None)) is not None:
                setattr(config, name, token_id)
        if config.is_encoder_decoder and tokenizer.pad_token_id is not None and self.weights is None:
            config.decoder_start_token_id = tokenizer.pad_token_id
        return replace(self, config=config, max_positions=max_positions_of(config))


_RANDOM = "_frugal_random_weights"


def random_weights(module: nn.Module) -> tuple[str, ...]:
    """Return the parameters of a pretrained model that were not among its weights, such as a new head's."""
    return getattr(module, _RANDOM, ())


def check_sequence_length(spec: ModelSpec, seq_len: int) -> None:
    """Refuse samples that the model has no positions for.

    Raises:
        RequestError: `seq_len` tokens are more than its positions.
    """
    refuse(
        (
            spec.max_positions is not None and seq_len > spec.max_positions,
            f"--seq-len {seq_len} is longer than {spec.reference} can read",
            f"it has {spec.max_positions} positions",
            f"use --seq-len {spec.max_positions} or less",
        )
    )


def heads(task: str, model_type: str) -> tuple[type[Any], ...]:
    """Return the classes that transformers has for `task` and models of this type."""
    return classes_in(_AUTO[task][1], model_type)


def classes_in(mapping: str, model_type: str) -> tuple[type[Any], ...]:
    """Return the classes of a type of model in one of transformers' mappings, such as `MODEL_MAPPING`."""
    if model_type not in transformers.CONFIG_MAPPING:
        return ()
    classes = getattr(transformers, mapping).get(transformers.CONFIG_MAPPING[model_type], ())
    return classes if isinstance(classes, tuple) else (classes,)


def max_positions_of(config: Any) -> int | None:
    """Return the tokens that the position embeddings reach; None where positions are relative."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    never_used = (text.pad_token_id or 0) + 1 if text.model_type in _POSITIONS_AFTER_PADDING else 0
    return positions - never_used if isinstance(positions, int) and positions > 0 else None
