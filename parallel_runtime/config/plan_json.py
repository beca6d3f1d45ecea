"""A layout as plain JSON values, and back."""

from collections.abc import Mapping
from typing import Any

from parallel_runtime.topology.layout import Layout

__all__ = ["layout_as_dict", "layout_from_dict"]

_SIZES = ("tp", "cp", "dp", "pp", "ep", "etp", "dcp")
_RANGE, _LIST = "start, stop, step", "listed"


def layout_as_dict(layout: Layout) -> dict[str, object]:
    """Write a layout as plain values.

    Args:
        layout: The layout.

    Returns:
        What ``layout_from_dict`` reads. A range of ranks stays short, whatever the world size.
    """
    sizes = {name: getattr(layout, name) for name in _SIZES}
    match layout.ranks:
        case range(start=start, stop=stop, step=step):
            ranks = {"ranks_are": _RANGE, "ranks": [start, stop, step]}
        case listed:
            ranks = {"ranks_are": _LIST, "ranks": list(listed)}
    return {**sizes, "order": list(layout.order), **ranks}


def layout_from_dict(data: Mapping[str, Any]) -> Layout:
    """Read what ``layout_as_dict`` wrote.

    Args:
        data: The values.

    Returns:
        The layout.

    Raises:
        ConfigError: Such a layout is impossible.
        KeyError: Something is missing.
        TypeError: Something is of another type, or unknown.
    """
    ranks = tuple(data["ranks"]) if data["ranks_are"] == _LIST else range(*data["ranks"])
    sizes = {name: value for name, value in data.items() if name != "ranks_are"}
    return Layout(**{**sizes, "order": tuple(data["order"]), "ranks": ranks})
