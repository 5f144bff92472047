"""Counts are read alike from flags, frugal.toml and Python."""

import pytest

from frugal.config.run_settings import RunSettings
from frugal.config.schema import requested, settings_of_toml
from frugal.config.setting import build
from frugal.errors import RequestError
from frugal.units import parse_count


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("512", 512),
        ("4M", 4_000_000),
        ("2B", 2 * 10**9),
        ("1.5k", 1500),
        ("1_000", 1000),
        ("-3", -3),
        ("1T", 10**12),
        ("2e9", 2 * 10**9),
        ("1.5E+3", 1500),
    ],
)
def test_a_suffix_is_a_power_of_a_thousand(text: str, number: int) -> None:
    assert parse_count(text) == number


def test_of_a_length_it_is_a_power_of_1024() -> None:
    assert parse_count("128k", 1024) == 131072
    assert requested({"seq_len": "4k"})[0].seq_len == 4096


@pytest.mark.parametrize("text", ["", "k", "4 M", "4G", "1.0005k", "1.5e0", "1e-3", "1,000", "four", "1__0", "1_"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_count(text)
    assert str(caught.value) == f"`{text}` is no whole number\n\nhint: write a count such as 512, 128k, 4M or 2B"


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(RequestError):
        parse_count("9" * 5000)


def test_frugal_toml_and_set_take_them_too() -> None:
    file = settings_of_toml({"global-tokens": "4M", "train": {"steps": "10k"}}, ["seq-len=2k", "schedule.warmup=1k"])
    request, _ = requested(file)
    assert (request.global_tokens, request.seq_len) == (4_000_000, 2048)
    settings = build(RunSettings, file)
    assert (settings.steps, settings.schedule.curve(1.0, 10_000, settings.warmup).warmup_steps) == (10_000, 1000)
