"""The rules of the house as pure functions: modules in, violations out.

Each rule takes parsed modules and returns one line per violation, so that it can be tried on planted faults as well.
"""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from tests.architecture.source_tree import PACKAGE, Module, imported_names, resolve

FLOORS = {
    "errors": 1, "lazy": 1, "terms": 1, "values": 1,
    "comm": 2, "topology": 2,
    "config": 3, "layers": 3,
    "context": 4, "models": 4,
    "launch": 5, "interop": 5,
    "serving": 6,
    "cli": 7,
}  # fmt: skip
TESTING_TOP_FLOOR = 5
ENVIRON_ROOMS = ("parallel_runtime.config.environment",)
C10D_ROOMS = ("parallel_runtime.comm.c10d", "parallel_runtime.comm.process_group", "parallel_runtime.interop")
TORCH_FREE_ROOMS = ("parallel_runtime.topology", "parallel_runtime.terms", "parallel_runtime.errors", "parallel_runtime.values")
PICKLE_ROOMS = ("parallel_runtime.launch", "parallel_runtime.comm.codec")
MUTABLE_CALLS = frozenset(
    "dict list set bytearray defaultdict deque OrderedDict Counter ChainMap count cycle ContextVar local Lock RLock Event "
    "Condition Semaphore Queue SimpleQueue WeakKeyDictionary WeakValueDictionary WeakSet".split()
)


def check_floors(modules: Mapping[str, Module]) -> list[str]:
    """Imports point down; rooms on one floor do not know each other; nothing imports ``testing``."""
    found = []
    for module in modules.values():
        if not module.room:
            continue
        for name, line in imported_names(module):
            target = resolve(name, modules)
            if target is None or modules[target].room == module.room:
                continue
            if not _may_import(module.room, modules[target].room):
                found.append(
                    f"{module.name}:{line} imports {target}: {module.room} may not stand on {modules[target].room or PACKAGE}"
                )
    return found


def _may_import(room: str, target: str) -> bool:
    if target not in FLOORS:
        return False
    if room == "testing":
        return FLOORS[target] <= TESTING_TOP_FLOOR
    return FLOORS[target] < FLOORS[room]


def check_cycles(modules: Mapping[str, Module]) -> list[str]:
    """No module reaches itself through imports, wherever in a file they stand."""
    graph = {
        module.name: {
            target for name, _ in imported_names(module) if (target := resolve(name, modules)) and target != module.name
        }
        for module in modules.values()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def check_module_state(modules: Mapping[str, Module]) -> list[str]:
    """No ``global``, and nothing at module or class level that can change."""
    found = []
    for module in modules.values():
        found += [f"{module.name}:{node.lineno} global" for node in ast.walk(module.tree) if isinstance(node, ast.Global)]
        scopes = [node for node in ast.walk(module.tree) if isinstance(node, ast.Module | ast.ClassDef)]
        for scope in scopes:
            found += [f"{module.name}:{line} mutable state {name}" for name, line in _mutable_assignments(scope)]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef) and node.name == "__del__":
                found.append(f"{module.name}:{node.lineno} __del__")
        found += [
            f"{module.name}:{line} {name}"
            for name, line in imported_names(module)
            if name.split(".")[0] == "atexit" or name in ("contextvars", "contextvars.ContextVar")
        ]
    return found


def _mutable_assignments(scope: ast.Module | ast.ClassDef) -> Iterator[tuple[str, int]]:
    for node in scope.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = ", ".join(ast.unparse(target) for target in targets)
        if names not in ("__all__", "__slots__") and _is_mutable(node.value):
            yield names, node.lineno


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    return isinstance(value, ast.Call) and _last_name(value.func) in MUTABLE_CALLS


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def check_reserved_imports(modules: Mapping[str, Module]) -> list[str]:
    """``os.environ``, ``torch.distributed``, torch and pickle stay in the rooms that own them."""
    found = []
    for module in modules.values():
        for name, line in imported_names(module):
            found += [f"{module.name}:{line} imports {name}" for bad in _reserved(module.name, name) if bad]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                text = f"{node.value.id}.{node.attr}"
                if text in ("os.environ", "os.getenv", "os.putenv") and not _inside(module.name, ENVIRON_ROOMS):
                    found.append(f"{module.name}:{node.lineno} reads {text}")
                if text == "torch.distributed" and not _inside(module.name, C10D_ROOMS):
                    found.append(f"{module.name}:{node.lineno} uses {text}")
    return found


def _reserved(module: str, name: str) -> Iterator[bool]:
    yield (name + ".").startswith("torch.distributed.") and not _inside(module, C10D_ROOMS)
    yield name.split(".")[0] == "torch" and _inside(module, TORCH_FREE_ROOMS)
    yield name.split(".")[0] in ("pickle", "cloudpickle", "dill", "marshal") and not _inside(module, PICKLE_ROOMS)
    yield name in ("os.environ", "os.getenv", "os.putenv") and not _inside(module, ENVIRON_ROOMS)


def _inside(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def check_exports(modules: Mapping[str, Module]) -> list[str]:
    """``__all__`` is sorted and equals the public names: defined in a module, imported in a package's ``__init__``."""
    found = []
    for module in modules.values():
        visible = set(_imported_here(module) if module.is_package else ()) | set(_defined_here(module))
        exported = _exported(module)
        if exported is None:
            if visible:
                found.append(f"{module.name} has no __all__ but shows {sorted(visible)}")
            continue
        if set(exported) != visible:
            found.append(f"{module.name}.__all__ differs from what is visible: {sorted(set(exported) ^ visible)}")
        if sorted(exported, key=_all_order) != exported and sorted(exported) != exported:
            found.append(f"{module.name}.__all__ is not sorted")
    return found


def _all_order(name: str) -> tuple[int, str]:
    """The order ruff keeps: CONSTANTS, then Classes, then functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _exported(module: Module) -> list[str] | None:
    for node in module.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = getattr(node, "value", None)
            return [str(item) for item in ast.literal_eval(value)] if value is not None else []
    return None


def _defined_here(module: Module) -> Iterator[str]:
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_") and name != "logger")


def _imported_here(module: Module) -> Iterator[str]:
    """What a package shows: all that it imports, at once or lazily, but the means of doing so."""
    branches = [node.body for node in module.tree.body if isinstance(node, ast.If)]
    for node in [*module.tree.body, *(node for branch in branches for node in branch)]:
        if isinstance(node, ast.ImportFrom) and node.module not in ("typing", f"{PACKAGE}.lazy"):
            yield from (alias.asname or alias.name for alias in node.names if not (alias.asname or alias.name).startswith("_"))


def check_docstrings(modules: Mapping[str, Module]) -> list[str]:
    """Every public name has a docstring, and it (or that of its class) names each exception the body raises.

    A method that a base class in this package documents needs no second text.
    """
    found = []
    classes = {node.name: node for module in modules.values() for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)}
    for module in modules.values():
        if not module.is_package and not ast.get_docstring(module.tree):
            found.append(f"{module.name} has no docstring")
        for owner, node in _public_definitions(module.tree, None):
            where = f"{module.name}:{node.lineno} {owner.name + '.' if owner else ''}{node.name}"
            text = ast.get_docstring(node) or _inherited_docstring(owner, node.name, classes)
            if not text and not _is_overload(node):
                found.append(f"{where} has no docstring")
            if isinstance(node, ast.ClassDef):
                continue
            context = text + (ast.get_docstring(owner) or "" if owner else "")
            found += [f"{where} raises {error} but does not say so" for error in sorted(_raised(node)) if error not in context]
    return found


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _public_definitions(
    scope: ast.Module | ast.ClassDef, owner: ast.ClassDef | None
) -> Iterator[tuple[ast.ClassDef | None, Definition]]:
    for node in scope.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield owner, node
            if isinstance(node, ast.ClassDef):
                yield from _public_definitions(node, node)


def _is_overload(node: Definition) -> bool:
    """An ``@overload`` or a property setter is documented where it is defined."""
    return any(_last_name(d) in ("overload", "setter") for d in node.decorator_list)


def _inherited_docstring(owner: ast.ClassDef | None, name: str, classes: Mapping[str, ast.ClassDef]) -> str:
    base_names = [_last_name(expr) for expr in (owner.bases if owner else ())]
    for base in (classes[base_name] for base_name in base_names if base_name in classes):
        for node in base.body:
            if isinstance(node, Definition) and node.name == name and (text := ast.get_docstring(node)):
                return text
        if text := _inherited_docstring(base, name, classes):
            return text
    return ""


def _raised(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    names = set()
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = _last_name(node.exc.func)
            if name.endswith("Error"):
                names.add(name)
        stack.extend(ast.iter_child_nodes(node))
    return names
