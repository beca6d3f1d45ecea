"""The package as a set of parsed modules, and what each of them imports."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "parallel_runtime"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One source file: its dotted name, its syntax tree, and whether it is a package's ``__init__``."""

    name: str
    tree: ast.Module
    is_package: bool

    @property
    def room(self) -> str:
        """``comm`` for ``parallel_runtime.comm.codec``, ``errors`` for ``parallel_runtime.errors``, ``""`` for the package."""
        return self.name.partition(".")[2].partition(".")[0]


def parse_module(name: str, source: str, *, is_package: bool = False) -> Module:
    """Parse one module from text, as planted faults are."""
    return Module(name=name, tree=ast.parse(source), is_package=is_package)


def read_package(root: Path = ROOT) -> dict[str, Module]:
    """Parse every module of the package."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = parse_module(name, path.read_text(), is_package=is_package)
    return modules


def imported_names(module: Module) -> Iterator[tuple[str, int]]:
    """Yield ``(dotted name, line)`` of every import, those in functions and under TYPE_CHECKING included."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.name.split(".")
    keep = len(parts) - node.level + (1 if module.is_package else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def resolve(name: str, modules: Mapping[str, Module]) -> str | None:
    """Return the module of this package that ``name`` leads to, or ``None`` for other packages."""
    if name.split(".")[0] != PACKAGE:
        return None
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None
