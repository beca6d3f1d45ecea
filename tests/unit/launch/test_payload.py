"""The call on its way to another process."""

import multiprocessing
import threading
from collections.abc import Callable

import pytest

from parallel_runtime.errors import LaunchError
from parallel_runtime.launch.payload import name_of, pack_call, unpack_call


class Holder:
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def method(self) -> None:
        """Does nothing."""


def add(a: int, b: int) -> int:
    return a + b


def test_a_call_survives() -> None:
    data, handles = pack_call(add, (1, 2))
    fn, args = unpack_call(data, handles)
    assert (fn, args, handles) == (add, (1, 2), [])


def test_connections_travel_beside_the_call() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer:
        data, handles = pack_call(add, (reader, {"nested": writer}))
        assert handles == [reader, writer]
        assert unpack_call(data, ["first", "second"])[1] == ("first", {"nested": "second"})


def nested() -> Callable[[], int]:
    def inner() -> int:
        return 1

    return inner


@pytest.mark.parametrize(
    ("fn", "args", "named"),
    [
        (lambda: 1, (), r"the function, .*<lambda> \(.*test_payload\.py:\d+\)"),
        (nested(), (), r"the function, nested\.<locals>\.inner"),
        (Holder().method, (), r"the function, the method Holder\.method bound to a Holder"),
        (add, (1, Holder()), r"argument 2, a Holder"),
    ],
)
def test_what_cannot_be_pickled_is_named(fn: Callable[..., object], args: tuple[object, ...], named: str) -> None:
    with pytest.raises(LaunchError, match=named):
        pack_call(fn, args)


def test_names_for_people() -> None:
    assert name_of(add) == f"{__name__}.add"
    assert name_of(Holder) == f"{__name__}.Holder"
