"""The examples in the pages about models do what they print."""

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


PAGES = (
    pytest.param("how_to/load_a_model.md", marks=(pytest.mark.model, pytest.mark.timeout(300))),
    "concepts/experts.md",
    "concepts/sharding.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_are_real(page: str) -> None:
    result = doctest.testfile(str(DOCS / page), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
