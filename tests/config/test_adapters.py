"""Values of `--lora`, in a flag, in frugal.toml and in Python."""

from pathlib import Path

import pytest

from frugal.config.adapters import Lora
from frugal.config.schema import read_toml, requested
from frugal.errors import RequestError


def test_a_rank_is_enough() -> None:
    assert Lora.of("r=16") == Lora(rank=16, alpha=32.0, dropout=0.0, targets=("all-linear",), dora=False)


@pytest.mark.parametrize(
    "text",
    [
        "r=16,alpha=32,dropout=0.05,targets=all-linear,dora",
        "targets=q_proj,v_proj,dora,r=16,alpha=8.5",
        "rank=16, lora_alpha=32, target_modules=q_proj",
    ],
)
def test_what_is_printed_is_read_as_the_same(text: str) -> None:
    assert Lora.of(str(Lora.of(text))) == Lora.of(text)


def test_names_may_follow_each_other() -> None:
    lora = Lora.of("r=4,targets=q_proj,v_proj,dora")
    assert (lora.targets, lora.dora) == (("q_proj", "v_proj"), True)


def test_flag_table_and_python_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "frugal.toml"
    file.write_text('[lora]\nr = 16\ndropout = 0.1\ntargets = ["q_proj", "v_proj"]\n')
    asked = Lora(rank=16, alpha=32, dropout=0.1, targets=("q_proj", "v_proj"))
    table = {"r": 16, "dropout": 0.1, "targets": "q_proj,v_proj"}
    for value in (read_toml(file)["lora"], str(asked), asked, table):
        assert requested({"lora": value})[0].lora == asked


MISTAKES = {
    "alpha=32": "--lora was given without a rank\n\nhint: write --lora r=16",
    "r=0": "`r` of --lora is 0\n  because it must be at least 1",
    "r=1.5": "`r` of --lora is 1.5\n  because it must be a whole number",
    "r=8,r=9": "`r` of --lora is there twice\n  because it has one value",
    "r=8,alpha=0": "`alpha` of --lora is 0\n  because it must be a finite number over 0",
    "r=8,dropout=1": "`dropout` of --lora is 1\n  because it must be at least 0 and less than 1",
    "r=8,drop=0.1": "--lora knows no `drop`\n  because it has r, alpha, dropout, targets, dora\n\nhint: did you mean",
    "r=8,alpha": "`alpha` of --lora has no value\n\nhint: write --lora r=16,alpha=32,dropout=0.05",
    "r=8,targets=all-linear,lm_head": "`targets` of --lora is all-linear, lm_head\n  because all-linear already names",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_what_is_wrong_is_said(text: str) -> None:
    with pytest.raises(RequestError) as error:
        Lora.of(text)
    assert str(error.value).startswith(MISTAKES[text])
