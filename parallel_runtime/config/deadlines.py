"""How long each plane may wait."""

from typing import Annotated

from pydantic import BeforeValidator, ValidationInfo

from parallel_runtime.config.base import FrozenModel
from parallel_runtime.errors import ConfigError
from parallel_runtime.values import seconds_problem

__all__ = ["Deadlines"]


def _check(value: object, info: ValidationInfo) -> object:
    if problem := seconds_problem(str(info.field_name), value):
        raise ConfigError(problem)
    return value


_Seconds = Annotated[float, BeforeValidator(_check)]


class Deadlines(FrozenModel):
    """Deadlines in seconds, one for each plane, applied to every group of a context.

    Attributes:
        join_s: For all ranks to join when a context opens.
        collective_s: For one collective on the data plane.
        control_s: For one object message on the control plane.
        p2p_s: For one point-to-point message.
        exit_s: For a context to close, and for a rank to end once it was told to.

    Raises:
        ConfigError: A deadline is not a number above 0 and at most 1e9.
    """

    join_s: _Seconds = 60.0
    collective_s: _Seconds = 120.0
    control_s: _Seconds = 120.0
    p2p_s: _Seconds = 120.0
    exit_s: _Seconds = 10.0
