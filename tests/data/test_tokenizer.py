"""Tokenizers: bytes need none, and no other is changed by its use."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frugal.data.tokenizer import byte_tokenizer, encode, fingerprint, load_tokenizer
from tests.engine.corpora import refusal

PAD, EOS, BOS, MASK = 0, 1, 2, 3


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_bytes_come_back_as_the_text_they_were(text: str) -> None:
    tokenizer = byte_tokenizer()
    (ids,) = encode(tokenizer, [text])
    assert tokenizer.decode(ids) == text


def test_the_byte_tokenizer_survives_being_saved(tmp_path: Path) -> None:
    """And the fast path for it agrees with the tokenizer itself."""
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    loaded = load_tokenizer(str(tmp_path / "tokenizer"))
    text = "".join(map(chr, range(1, 0x3000, 7))) + " <eos>\r\n\t<mask> 🐢"
    assert np.array_equal(encode(loaded, [text])[0], encode(byte_tokenizer(), [text])[0])
    assert len(loaded) == len(byte_tokenizer()) == 260
    before = fingerprint(loaded)
    loaded(["text", "longer text"], padding=True, truncation=True, max_length=6)
    assert fingerprint(loaded) == before, "using it does not change it"
    special = [loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id, loaded.mask_token_id]
    assert special == [PAD, EOS, BOS, MASK]


@pytest.mark.usefixtures("offline")
def test_a_missing_tokenizer() -> None:
    assert refusal(lambda: load_tokenizer("./nope")) == (
        "there is no tokenizer at ./nope\n\nhint: give a folder with a tokenizer.json, or `byte`"
    )
    said = refusal(lambda: load_tokenizer("nobody/nothing"))
    assert said.startswith("there is no tokenizer `nobody/nothing`\n") and said.endswith(
        "hint: `byte` needs no download"
    )
