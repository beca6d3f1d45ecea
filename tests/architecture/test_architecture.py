"""The house stands as the design draws it, and each rule is shown to catch a planted fault."""

from collections.abc import Callable, Mapping

import pytest

from tests.architecture import rules
from tests.architecture.source_tree import Module, parse_module, read_package

Rule = Callable[[Mapping[str, Module]], list[str]]

RULES: tuple[Rule, ...] = (
    rules.check_floors,
    rules.check_cycles,
    rules.check_module_state,
    rules.check_reserved_imports,
    rules.check_exports,
    rules.check_docstrings,
)


@pytest.fixture(scope="module")
def package() -> dict[str, Module]:
    return read_package()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule, package: dict[str, Module]) -> None:
    assert len(package) > 20, "the package was not found"
    assert rule(package) == []


PLANTED: tuple[tuple[Rule, str, str], ...] = (
    (rules.check_floors, "parallel_runtime.comm.bad", "from parallel_runtime.config import parallel_config"),
    (rules.check_floors, "parallel_runtime.comm.bad", "def f():\n    import parallel_runtime.context"),
    (rules.check_floors, "parallel_runtime.comm.bad", "if TYPE_CHECKING:\n    from parallel_runtime.serving import engine"),
    (rules.check_floors, "parallel_runtime.comm.bad", "from parallel_runtime.topology import layout"),
    (rules.check_floors, "parallel_runtime.comm.bad", "from ..config import parallel_config"),
    (rules.check_floors, "parallel_runtime.cli.bad", "from parallel_runtime.testing import strategies"),
    (rules.check_floors, "parallel_runtime.testing.bad", "from parallel_runtime.serving import engine"),
    (rules.check_floors, "parallel_runtime.serving.bad", "from parallel_runtime import ParallelContext"),
    (rules.check_module_state, "parallel_runtime.comm.bad", "X = 1\ndef f():\n    global X\n    X = 2"),
    (rules.check_module_state, "parallel_runtime.comm.bad", "CACHE: dict[str, int] = {}"),
    (rules.check_module_state, "parallel_runtime.comm.bad", "ids = itertools.count()"),
    (rules.check_module_state, "parallel_runtime.comm.bad", "class A:\n    live = []"),
    (rules.check_module_state, "parallel_runtime.comm.bad", "from contextvars import ContextVar"),
    (rules.check_module_state, "parallel_runtime.comm.bad", "import atexit"),
    (rules.check_module_state, "parallel_runtime.comm.bad", "class A:\n    def __del__(self): ..."),
    (rules.check_reserved_imports, "parallel_runtime.comm.bad", "import os\nx = os.environ['A']"),
    (rules.check_reserved_imports, "parallel_runtime.comm.bad", "from os import environ"),
    (rules.check_reserved_imports, "parallel_runtime.comm.bad", "import torch.distributed as dist"),
    (rules.check_reserved_imports, "parallel_runtime.comm.bad", "from torch.distributed import Store"),
    (rules.check_reserved_imports, "parallel_runtime.comm.bad", "import torch\ntorch.distributed.barrier()"),
    (rules.check_reserved_imports, "parallel_runtime.topology.bad", "import torch"),
    (rules.check_reserved_imports, "parallel_runtime.serving.bad", "import pickle"),
    (rules.check_exports, "parallel_runtime.comm.bad", "def shown(): ..."),
    (rules.check_exports, "parallel_runtime.comm.bad", "__all__ = ['gone']"),
    (rules.check_exports, "parallel_runtime.comm.bad", "__all__ = ['b', 'a']\nb = 1\na = 2"),
    (rules.check_docstrings, "parallel_runtime.comm.bad", '"""Doc."""\ndef shown(): ...'),
    (rules.check_docstrings, "parallel_runtime.comm.bad", '"""Doc."""\nclass A:\n    """Doc."""\n    def f(self): ...'),
    (rules.check_docstrings, "parallel_runtime.comm.bad", '"""Doc."""\ndef f():\n    """Doc."""\n    raise PeerLostError("x")'),
)  # fmt: skip


@pytest.mark.parametrize(("rule", "name", "source"), PLANTED)
def test_a_planted_fault_is_found(rule: Rule, name: str, source: str, package: dict[str, Module]) -> None:
    planted = {**package, name: parse_module(name, source)}
    assert [line for line in rule(planted) if name in line], f"{rule.__name__} missed: {source}"


def test_a_planted_cycle_is_found() -> None:
    modules = {
        name: parse_module(name, source)
        for name, source in {
            "parallel_runtime.comm.a": "from parallel_runtime.comm.b import x",
            "parallel_runtime.comm.b": "def f():\n    from parallel_runtime.comm import c",
            "parallel_runtime.comm.c": "import parallel_runtime.comm.a",
            "parallel_runtime.comm": "",
        }.items()
    }
    assert rules.check_cycles(modules)
    del modules["parallel_runtime.comm.c"]
    assert rules.check_cycles(modules) == []
