"""Checks that messages share: a value has the very type it should, and nothing is converted."""

from math import isfinite

from parallel_runtime.errors import RequestError

__all__ = ["check_integer", "check_name", "check_number", "check_tokens", "shown"]

_MAX_INTEGER = 2**63 - 1


def check_integer(what: str, value: object, *, low: int) -> None:
    """Refuse what is no integer from ``low`` to ``2**63 - 1``.

    Args:
        what: Its name.
        value: The value.
        low: Least value.

    Raises:
        RequestError: It is something else.
    """
    if type(value) is not int or value < low:
        raise RequestError(f"{what} must be an integer of at least {low}, got {shown(value)}")
    if value > _MAX_INTEGER:
        raise RequestError(f"{what} must be below 2**63, got {shown(value)}")


def check_number(what: str, value: object, *, low: float, high: float, rule: str) -> None:
    """Refuse what is no finite number from ``low`` to ``high``.

    Args:
        what: Its name.
        value: The value.
        low: Least value.
        high: Greatest value.
        rule: What it must be, in words.

    Raises:
        RequestError: It is something else.
    """
    is_number = isfinite(value) if type(value) is float else type(value) is int and abs(value) <= _MAX_INTEGER
    if not (is_number and low <= value <= high):  # type: ignore[operator]  # a number, by the line above
        raise RequestError(f"{what}={shown(value)} {rule}")


def check_tokens(what: str, values: object, *, each: str) -> None:
    """Refuse what is no tuple of token ids.

    Args:
        what: Its name.
        values: The value.
        each: Name of each of its items.

    Raises:
        RequestError: It is something else.
    """
    if not isinstance(values, tuple):
        raise RequestError(f"{what} must be a tuple of token ids such as (1, 2), got {values!r}")
    for value in values:
        check_integer(each, value, low=0)


def check_name(value: object) -> None:
    """Refuse what names no request.

    Args:
        value: The name.

    Raises:
        RequestError: It is no text, is empty, or cannot be printed.
    """
    if not isinstance(value, str) or not value:
        raise RequestError(f"a request needs a request_id that is not empty, as text; got {value!r}")
    if not value.isprintable():
        raise RequestError(f"request_id={value!r} has characters that cannot be printed")


def shown(value: object) -> str:
    """Write a value down for a message; Python refuses to do it for an integer of thousands of digits.

    Args:
        value: The value.
    """
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)
