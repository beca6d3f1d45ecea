"""Small integer helpers behind every size check, and behind the sizes its error message offers."""

from collections.abc import Iterable
from math import isqrt

__all__ = ["divisors", "join_sizes", "nearest"]


def divisors(number: int) -> tuple[int, ...]:
    """List the divisors of a positive integer.

    Args:
        number: Positive integer.

    Returns:
        All divisors, ascending.
    """
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return tuple(small + [number // size for size in reversed(small) if size * size != number])


def nearest(sizes: Iterable[int], to: int) -> tuple[int, ...]:
    """Pick the sizes next to a refused one.

    Args:
        sizes: Sizes that work.
        to: The size that does not.

    Returns:
        The largest one below and the smallest one above, as far as they exist.
    """
    sizes = tuple(sizes)
    below = [size for size in sizes if size < to]
    above = [size for size in sizes if size > to]
    return tuple(below and [max(below)]) + tuple(above and [min(above)])


def join_sizes(sizes: Iterable[int]) -> str:
    """Write sizes for a message.

    Args:
        sizes: Integers in the order they are to be shown.

    Returns:
        Text such as ``"1, 2, 4"``.
    """
    return ", ".join(map(str, sizes))
