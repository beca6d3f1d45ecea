"""Prometheus's text format."""

from collections.abc import Iterable, Iterator, Mapping

__all__ = ["family"]


def family(name: str, kind: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    """Write one family of samples down.

    Args:
        name: Of the metric.
        kind: ``"counter"`` or ``"gauge"``.
        text: For people.
        samples: Labels and value.

    Yields:
        Lines, without their ends.
    """
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{_labels(labels)} {value}"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
