"""The Python that the pages show at a prompt prints what they show."""

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITH_A_MODEL = ("docs/how_to/load_a_model.md",)
PAGES = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md") if "\n>>> " in page.read_text(encoding="utf-8"))
MODEL = (pytest.mark.model, pytest.mark.timeout(300))


@pytest.mark.parametrize("page", [pytest.param(page, marks=MODEL if page in WITH_A_MODEL else ()) for page in PAGES])
def test_examples_are_real(page: str) -> None:
    results = doctest.testfile(str(ROOT / page), module_relative=False, encoding="utf-8")
    assert results.attempted > 0
    assert results.failed == 0


def test_the_pages_were_found() -> None:
    assert len(PAGES) >= 10
    assert set(WITH_A_MODEL) <= set(PAGES)
