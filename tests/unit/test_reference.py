"""Every public name is in the API reference."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import parallel_runtime
from parallel_runtime import testing

API = Path(__file__).resolve().parents[2] / "docs" / "reference" / "api"
ROOMS = {name for _, name, is_package in pkgutil.iter_modules(parallel_runtime.__path__) if is_package} | {"errors", "terms"}
KIT = {f"testing.{name}" for _, name, _ in pkgutil.iter_modules(testing.__path__)}


@pytest.fixture(scope="module")
def shown() -> set[str]:
    """The modules whose names the pages list."""
    return set(re.findall(r"^::: parallel_runtime\.([\w.]+)$", "\n".join(page.read_text() for page in API.glob("*.md")), re.M))


@pytest.mark.parametrize("room", sorted((ROOMS | KIT) - {"cli", "testing"}))
def test_the_names_of_a_room_are_in_the_reference(room: str, shown: set[str]) -> None:
    assert room in shown
    module = importlib.import_module(f"parallel_runtime.{room}")
    hidden = {name for _, name, _ in pkgutil.iter_modules(getattr(module, "__path__", ()))} & set(module.__all__)
    assert {f"{room}.{name}" for name in hidden} <= shown, "a module of the same name hides it"


def test_the_names_of_the_front_door_are_in_the_reference(shown: set[str]) -> None:
    listed = {name for room in shown for name in importlib.import_module(f"parallel_runtime.{room}").__all__}
    assert set(parallel_runtime.__all__) <= listed
