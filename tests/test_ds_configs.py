"""The decisions in ds_configs/ are the ones frugal makes today; `python ds_configs/generate.py` renews them."""

from pathlib import Path

import pytest

from ds_configs.generate import cases, generate

ROOT = Path(__file__).parents[1]
FAST, SLOW = cases(slow=False), cases(slow=True)
IN_EVERY_RUN = {name: FAST[name] for name in ("pinned", "translation-on-3x12g", "gpt2-xl-without-offloading")}
OTHERS = {name: settings for name, settings in (FAST | SLOW).items() if name not in IN_EVERY_RUN}


@pytest.mark.parametrize(
    "wanted", [IN_EVERY_RUN, pytest.param(OTHERS, marks=pytest.mark.exhaustive)], ids=["in every run", "others"]
)
def test_the_cases_come_out_as_they_are_kept(
    wanted: dict[str, dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # some models are files here
    generate(tmp_path, wanted)
    for name in wanted:
        for path in (Path(f"{name}.txt"), Path(f"{name}.json")):
            kept, made = ROOT / "ds_configs" / path, tmp_path / path
            assert made.exists() == kept.exists(), path
            assert not made.exists() or made.read_text() == kept.read_text(), path


def test_nothing_is_kept_of_a_case_that_is_gone() -> None:
    kept = {path.stem for path in (ROOT / "ds_configs").iterdir() if path.suffix in (".txt", ".json")}
    assert kept == {*FAST, *SLOW}
