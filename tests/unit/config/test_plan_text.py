"""Numbers and ranks as people read them."""

import pytest

from parallel_runtime.config.plan_text import format_bytes, format_count, format_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(0), ""),
        (range(1), "0"),
        ((0, 1), "0 1"),
        (range(4, 8), "4-7"),
        ((0, 2, 4), "0 2 4"),
        ((3, 1, 2), "3 1 2"),
        (range(0, 128, 8), "0 8 ... 120"),
        ((5, 1, 2, 3, 4, 0, 6, 7, 8, 9), "5 1 2 3 4 0 6 7 ... 2 more"),
        (tuple(range(9, -1, -1)), "9 8 7 6 5 4 3 2 ... 2 more"),
    ],
)
def test_format_ranks(ranks: range | tuple[int, ...], text: str) -> None:
    assert format_ranks(ranks) == text


def test_format_count() -> None:
    assert [format_count(number, "rank") for number in (0, 1, 2, 4096)] == ["0 ranks", "1 rank", "2 ranks", "4,096 ranks"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (60_000, "60 kB"), (12_600_000, "12.6 MB"), (10**15, "1e+03 TB")]
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
