"""Values that callers hand over and exceptions that they raise: how every floor checks them, and shows them in a message."""

from typing import Final

__all__ = ["LONGEST_S", "error_text", "seconds_problem", "shown", "type_problem"]

LONGEST_S: Final = 1e9
"""About 31 years; what is longer overflows the clocks below."""

_LONGEST_TEXT: Final = 100


def shown(value: object) -> str:
    """Show any value in a message.

    Args:
        value: Need not have a working ``repr``.

    Returns:
        At most about 100 characters of its ``repr``, or the name of its type.
    """
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__qualname__}>"
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def error_text(error: BaseException) -> str:
    """Show any exception in a message.

    Args:
        error: Need not have a working ``str``, nor text that can be encoded.

    Returns:
        Such as ``"ValueError: boom"``, or its type alone where it says nothing.
    """
    try:
        text = str(error).encode("utf-8", "backslashreplace").decode()
    except Exception as failure:
        text = f"(its text cannot be made: {type(failure).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def type_problem(name: str, value: object, wanted: type, hint: str) -> str:
    """Say that an argument has another type than it must have.

    Args:
        name: Of the argument.
        value: Of the argument.
        wanted: What it must be.
        hint: What would work.

    Returns:
        ``""`` for a value of the wanted type.
    """
    if isinstance(value, wanted):
        return ""
    return f"{name} must be a {wanted.__name__}, got {shown(value)} ({type(value).__name__}); {hint}"


def seconds_problem(name: str, value: object) -> str:
    """Say what is wrong with a duration.

    Args:
        name: Of the setting or argument.
        value: Of the setting or argument.

    Returns:
        ``""`` for an integer or float above 0 and up to ``LONGEST_S``.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_S:
        return ""
    return f"{name}={shown(value)} must be a number of seconds above 0 and at most {LONGEST_S:g}, such as {name}=30"
