"""From text to token ids: the built-in byte tokenizer, or any of transformers'."""

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frugal.errors import RequestError, first_line, refuse
from frugal.models import factories

BYTE = "byte"
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<mask>")  # ids 0 to 3; byte b has the id b + 4


def load_tokenizer(reference: str = BYTE) -> Any:
    """Return the tokenizer that `reference` names: `byte`, a folder with a tokenizer, or a hub name.

    Raises:
        RequestError: there is none.
    """
    if reference == BYTE:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    is_folder = Path(reference).is_dir()
    refuse(
        (
            not is_folder and reference.startswith((".", "/", "~")),
            f"there is no tokenizer at {reference}",
            "",
            "give a folder with a tokenizer.json, or `byte`",
        )
    )
    try:
        return AutoTokenizer.from_pretrained(
            reference,
            trust_remote_code=False,
            local_files_only=is_folder or factories.hub_unreachable_because() is not None,
        )
    except Exception as error:  # each tokenizer class fails in its own way
        raise RequestError(
            f"there is no tokenizer `{reference}`",
            because=first_line(error) if is_folder else factories.why_hub_failed(error),
            hint="`byte` needs no download",
        ) from None


@functools.cache
def byte_tokenizer() -> Any:
    """Return a tokenizer with one token a byte of UTF-8, after four special ones: 260 tokens. All text is text.

    A transformers tokenizer: `save_pretrained` writes a folder that `AutoTokenizer` loads.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    character_of = bytes_to_unicode()  # in a byte-level vocabulary
    tokens = (*_SPECIAL, *(character_of[byte] for byte in range(256)))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, eos, bos, mask = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, bos_token=bos, mask_token=mask,
        cls_token=bos, sep_token=eos, split_special_tokens=True, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def encode(tokenizer: Any, texts: Sequence[str], *, as_target: bool = False) -> list[NDArray[np.int32]]:
    """Return the token ids of each text, shape `(tokens,)`, without special tokens.

    `as_target`: with the target language's vocabulary, where the tokenizer has two.
    """
    if not texts:  # transformers fails on none
        return []
    if tokenizer is byte_tokenizer():  # the same ids, 50 times faster
        return [np.frombuffer(text.encode(), dtype=np.uint8) + np.int32(len(_SPECIAL)) for text in texts]
    keyword = {"text_target": list(texts)} if as_target else {"text": list(texts)}
    rows = tokenizer(**keyword, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [np.array(row, dtype=np.int32) for row in rows]


def fingerprint(tokenizer: Any) -> str:
    """Return the SHA-256 of the rules by which the tokenizer encodes texts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = {"vocabulary": sorted(tokenizer.get_vocab().items())} if backend is None else json.loads(backend.to_str())
    text = json.dumps({name: rule for name, rule in rules.items() if name not in ("padding", "truncation")})  # per call
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(f"{type(tokenizer).__name__}\n{text}\n{sorted(special.items())}".encode()).hexdigest()
