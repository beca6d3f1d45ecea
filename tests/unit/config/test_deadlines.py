"""Deadlines are positive, finite seconds."""

from math import inf, nan

import pytest

from parallel_runtime.config.deadlines import Deadlines
from parallel_runtime.errors import ConfigError


def test_defaults_and_whole_seconds() -> None:
    assert Deadlines().model_dump() == {"join_s": 60.0, "collective_s": 120.0, "control_s": 120.0, "p2p_s": 120.0, "exit_s": 10.0}
    assert Deadlines(join_s=3).join_s == 3.0


@pytest.mark.parametrize("name", list(Deadlines.model_fields))
@pytest.mark.parametrize("value", [0.0, -1.0, inf, nan, 1e300, 10**400, True, "3", None])
def test_anything_else_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        Deadlines.model_validate({name: value})
