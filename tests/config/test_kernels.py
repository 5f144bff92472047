"""`--kernels liger` where it is impossible is refused with what is in the way; `auto` is `plain` there."""

from typing import Any

import pytest

from frugal.config import kernels
from frugal.config.schema import understand
from frugal.errors import RequestError

GPUS = {"gpus": 2, "mem": "12G"}


@pytest.mark.parametrize(
    ("installed", "settings", "because", "hint"),
    [
        ("", GPUS, "the packages liger-kernel and triton are not installed",
         "pip install 'frugal-trainer[kernels]', or leave --kernels out"),
        ("both", {"gpus": 2, "gpu": "t4-16g", "precision": "fp16"},
         "they need compute capability 8.0 or newer, and there are GPUs of 7.5", "leave --kernels out"),
        ("both", {"device": "cpu", "gpus": 2, "mem": "2G", "precision": "fp32"},
         "its kernels run on GPUs alone", "leave --kernels out"),
    ],
)  # fmt: skip
def test_what_is_in_the_way(
    installed: str, settings: dict[str, Any], because: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "fused_kernels", lambda: installed)
    request, cluster, _ = understand(settings)
    assert not kernels.are_to_be_fused(request, cluster)
    request, cluster, _ = understand({**settings, "kernels": "liger"})
    with pytest.raises(RequestError) as caught:
        kernels.are_to_be_fused(request, cluster)
    assert (caught.value.what, caught.value.because, caught.value.hint) == (
        "--kernels liger is impossible here", (because,), hint,
    )  # fmt: skip


def test_a_machine_without_a_compiler_cannot_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "fused_kernels", lambda: "both")
    monkeypatch.setattr(kernels.shutil, "which", lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    assert kernels.what_is_missing() == (
        "Triton needs a C compiler and Python's headers", "install gcc and python3-dev",
    )  # fmt: skip


def test_cards_of_today_take_them_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "fused_kernels", lambda: "both")
    for asked, expected in (("auto", True), ("liger", True), ("plain", False)):
        assert kernels.are_to_be_fused(*understand({**GPUS, "kernels": asked})[:2]) == expected


def test_a_model_in_which_nothing_would_be_fused_is_refused_if_they_were_asked_for() -> None:
    request = understand({**GPUS, "kernels": "liger"})[0]
    kernels.refuse_none(request, ["2 RMSNorm"])
    with pytest.raises(RequestError, match="--kernels liger changes nothing of gpt2"):
        kernels.refuse_none(request, [])
