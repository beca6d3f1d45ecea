"""The reference pages name everything that the rooms show."""

import importlib
import inspect
from pathlib import Path

import pytest

from parallel_runtime.context import ParallelContext

DOCS = Path(__file__).parents[3] / "docs" / "reference"


@pytest.mark.parametrize("room", ["context", "launch"])
def test_every_public_name_and_argument_is_in_the_reference(room: str) -> None:
    page = (DOCS / f"{room}.md").read_text(encoding="utf-8")
    shown = importlib.import_module(f"parallel_runtime.{room}")
    for name in shown.__all__:
        thing = getattr(shown, name)
        assert f"`{name}" in page or f".{name}" in page, name
        if inspect.isfunction(thing):
            for argument in inspect.signature(thing).parameters:
                assert argument in page, f"{name}({argument})"
        for method in vars(thing) if inspect.isclass(thing) else ():
            assert method.startswith("_") or method in page, f"{name}.{method}"


def test_every_part_of_a_context_is_in_the_reference() -> None:
    page = (DOCS / "context.md").read_text(encoding="utf-8")
    for name, part in inspect.getmembers(ParallelContext):
        if name.startswith("_"):
            continue
        assert f"`{name}" in page or f".{name}" in page, name
        if inspect.isfunction(part):
            for argument in inspect.signature(part).parameters:
                assert argument == "self" or argument in page, f"{name}({argument})"
