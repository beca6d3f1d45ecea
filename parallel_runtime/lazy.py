"""Packages whose names are imported when somebody first asks for them: ``import parallel_runtime`` does not wait for torch."""

import ast
import sys
from collections.abc import Callable, Iterator
from importlib import import_module

__all__ = ["lazy_exports"]


def lazy_exports(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """What a package's ``__init__`` calls ``__getattr__`` and ``__dir__`` in the branch that type checkers do not read.

    The branch that they read, ``if TYPE_CHECKING:``, says where each name comes from; it is read here as well, the first time
    somebody asks for a name, so that nothing is said twice.

    Args:
        package: Its ``__name__``.

    Returns:
        ``__getattr__``, which imports the module of a name and keeps the name in the package; and ``__dir__``.
    """
    module = sys.modules[package]

    def get(name: str) -> object:
        if name.startswith("__") or (home := _homes(package).get(name)) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(home), name)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(module), *module.__all__})

    return get, names


def _homes(package: str) -> dict[str, str]:
    """Module of each name that the package's source imports for type checkers."""
    spec = sys.modules[package].__spec__
    source = spec.loader.get_source(package) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]
    return dict(_imports(ast.parse(source or "")))


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for branch in tree.body:
        if isinstance(branch, ast.If):
            for node in branch.body:
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    yield from ((alias.name, node.module) for alias in node.names)
