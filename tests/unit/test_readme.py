"""The README's commands are where CI looks for them, and the documents it names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(page for place in ("*.md", "docs/**/*.md", "benchmarks/*.md") for page in ROOT.glob(place))


@pytest.mark.parametrize("marker", ["main command", "test command"])
def test_a_command_follows_its_marker(marker: str) -> None:
    text = (ROOT / "README.md").read_text()
    assert re.search(rf"<!-- {marker} -->\n```sh\npython3 -m venv \.venv\n", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_output_is_still_to_be_filled_in(page: Path) -> None:
    assert not re.search(r"\bOUTPUT_[A-Z]+\b", page.read_text())
