"""Values that callers hand over, and exceptions that they raise."""

from math import inf, nan

import pytest

from parallel_runtime.values import LONGEST_S, error_text, seconds_problem, shown, type_problem


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_any_value_can_be_shown() -> None:
    assert shown("x") == "'x'"
    assert shown("x" * 1000) == "'" + "x" * 99 + "..."
    assert shown(Mute()) == "<Mute>"
    assert shown(10**5000) == "<int>"


def test_any_exception_can_be_told() -> None:
    assert error_text(ValueError("boom")) == "ValueError: boom"
    assert error_text(MuteError()) == "MuteError: (its text cannot be made: RuntimeError)"
    assert error_text(ValueError("\ud800")) == "ValueError: \\ud800"
    assert error_text(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_a_value_of_another_type_is_told() -> None:
    assert type_problem("name", "tp", str, "use a name") == ""
    assert type_problem("name", None, str, "use a name") == "name must be a str, got None (NoneType); use a name"


@pytest.mark.parametrize("value", [1, 0.001, LONGEST_S])
def test_seconds(value: float) -> None:
    assert seconds_problem("timeout_s", value) == ""


@pytest.mark.parametrize("value", [0, -1, nan, inf, 2e9, 10**400, True, "3", None, [1]])
def test_what_is_no_duration_is_told(value: object) -> None:
    problem = seconds_problem("timeout_s", value)
    assert problem.startswith(f"timeout_s={shown(value)} must be a number of seconds above 0 and at most 1e+09")
