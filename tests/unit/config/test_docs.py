"""The examples on the layout's pages print what the pages say."""

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("page", ["concepts/layout.md", "concepts/context_parallel.md", "how_to/choose_a_layout.md"])
def test_examples_are_real(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    test = doctest.DocTestParser().get_doctest("".join(blocks), {}, page, page, 0)
    results = doctest.DocTestRunner(verbose=False).run(test)
    assert results.attempted > 3
    assert results.failed == 0
