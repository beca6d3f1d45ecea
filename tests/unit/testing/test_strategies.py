"""The shipped strategies import hypothesis only when they are asked for, and say what is missing."""

import importlib
import sys

import pytest
from hypothesis import find, given

from parallel_runtime.config import ParallelConfig
from parallel_runtime.testing.strategies import configs


def test_without_hypothesis_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "parallel_runtime.testing.strategies")
    with pytest.raises(ImportError, match="needs hypothesis: pip install hypothesis"):
        importlib.import_module("parallel_runtime.testing.strategies")


@given(configs(max_axis=3, max_world_size=12))
def test_configs_stay_inside_their_limits(config: ParallelConfig) -> None:
    assert config.is_resolved
    assert config.world_size <= 12
    assert max(config.tp, config.cp, config.dp, config.pp) <= 3


def test_configs_reach_every_kind_of_layout() -> None:
    find(configs(), lambda config: config.pp > 1 and config.ep > 1 and config.edp > 1 and config.order[-1] != "pp")
    find(configs(), lambda config: config.cp > 1 and config.dcp > config.cp)
    find(configs(), lambda config: config.ranks is not None and config.tp > 1)
    find(configs(), lambda config: config.rank_offset > 0)
