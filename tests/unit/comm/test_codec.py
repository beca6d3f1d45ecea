"""Objects to bytes and back."""

from enum import Enum, IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.comm.codec import decode, decode_typed, encode, encode_typed, open_body
from parallel_runtime.comm.codec.extensions import is_plain
from parallel_runtime.comm.tensors import dtype_named
from parallel_runtime.errors import SerializationError

CPU = torch.device("cpu")
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=4)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | st.sets(HASHABLE, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(HASHABLE, inner, max_size=3),
    max_leaves=10,
)


def there_and_back(value: object, *, keep_out: bool = True) -> Any:
    encoded = encode(value, keep_out=keep_out)
    return there_and_back_of(encoded.body, encoded.buffers)


def there_and_back_of(encoded: bytearray, buffers: list[torch.Tensor]) -> Any:
    body = open_body(encoded, CPU)
    for target, source in zip(body.buffers, buffers, strict=True):
        target.copy_(source)
    return decode(body)


def typed(value: Any) -> Any:
    """``value`` with every type made visible, so that equality means the same kinds in the same order."""
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    if isinstance(value, dict):
        return dict, [(typed(key), typed(item)) for key, item in value.items()]
    return type(value), value


@given(VALUES)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    assert typed(there_and_back(value)) == typed(value)


def test_tensors_of_any_kind() -> None:
    shared = torch.randn(3, 2, requires_grad=True)
    value = {
        "shared": [shared, shared],
        "view": torch.arange(12.0).view(3, 4)[:, 1::2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "fp8": torch.ones(2).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "big": torch.randn(200, 200),
    }
    for keep_out in (True, False):
        encoded = encode(value, keep_out=keep_out)
        assert len(encoded.buffers) == (1 if keep_out else 0)
        got = there_and_back(value, keep_out=keep_out)
        assert got["shared"][0] is got["shared"][1]
        assert type(got["parameter"]) is torch.Tensor
        for key in ("view", "empty", "scalar", "parameter", "conjugate", "big"):
            assert torch.equal(got[key], value[key].resolve_conj())  # type: ignore[attr-defined]
            assert not got[key].requires_grad
        assert got["fp8"].dtype is torch.float8_e4m3fn
        assert torch.equal(got["shared"][0], shared.detach())


def test_numpy_and_torch_values() -> None:
    got = there_and_back(
        [np.float32(1.5), np.bool_(True), np.arange(6).reshape(2, 3), torch.bfloat16, torch.Size([2, 3]), bytearray(b"x")]
    )
    assert [type(item) for item in got] == [np.float32, np.bool_, np.ndarray, torch.dtype, torch.Size, bytearray]
    assert got[2].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert got[3:] == [torch.bfloat16, torch.Size([2, 3]), bytearray(b"x")]


class Level(IntEnum):
    LOW = 1


def test_lists_of_integers_keep_every_type() -> None:
    ints = [number * 31 % 251 - 100 for number in range(200)]
    edges = [-(2**31), 2**31 - 1, *ints]
    assert len(encode(edges).body) < 5 * len(edges) + 40
    for values in (ints, edges, [2**31, *ints], [*ints, True], [*ints, 1.0], [*ints, "i", None], [*ints, [1]], [*ints, 2**70]):
        for value in (values, {"ids": values}, (values, values)):
            assert typed(there_and_back(value)) == typed(value)
    with pytest.raises(SerializationError, match="Level"):
        encode([*ints, Level.LOW])


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda: 1, "builtins.function"),
        ([object()], "builtins.object"),
        ({"a": Colour.RED}, "Colour"),
        (np.array([object()]), "numpy array of dtype object"),
        ("\ud800", "no valid Unicode"),
        (torch.ones(2).to_sparse(), "expected a strided tensor"),
    ],
)
def test_what_cannot_travel_is_named(value: object, text: str) -> None:
    with pytest.raises((SerializationError, ValueError), match=text):
        encode(value)


@pytest.mark.parametrize(
    ("value", "is_so"),
    [
        ({"a": 1, "b": [True, None, {"c": b"x"}]}, True),
        ({}, True),
        ([1.5] * 32, True),
        ([1] * 33, False),
        ({"a": [(1,)]}, False),
        ({1: 2}, False),
        ({"a": {"b": Level.LOW}}, False),
        (Level.LOW, False),
    ],
)
def test_only_what_msgpack_keeps_goes_unexamined(value: object, is_so: bool) -> None:
    assert is_plain(value) is is_so


def test_what_contains_itself() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(SerializationError, match="nested too deeply, or contains itself"):
        encode(loop)


def test_pickle_only_where_both_ends_ask() -> None:
    body = encode(Colour.RED, pickle=True).body
    assert decode(open_body(body, CPU), pickle=True) is Colour.RED
    with pytest.raises(SerializationError, match="receive it with pickle=True"):
        decode(open_body(body, CPU))
    with pytest.raises(SerializationError, match=r"cannot pickle an object of type builtins.function"):
        encode(lambda: 1, pickle=True)


def test_damage_is_told() -> None:
    whole = encode({"x": torch.ones(3), "y": 1}).body
    for damaged in (bytearray(b"\xc1 no"), bytearray(b"\xc1 no message at all"), whole[:-1], whole[:30], b"\x05" + whole[1:]):
        with pytest.raises(SerializationError, match="arrived damaged"):
            open_body(damaged, CPU)
    unknown = bytearray(whole.replace(b"torch.float32", b"torch.nothing"))
    with pytest.raises(SerializationError, match=r"unknown dtype torch\.nothing"):
        open_body(unknown, CPU)
    with pytest.raises(ValueError, match="unknown dtype ones"):
        dtype_named("ones")
    wrong = bytearray(encode([1, 2, 3]).body)
    wrong[-4:] = msgspec.msgpack.encode(msgspec.msgpack.Ext(99, b"\x01\x02"))
    with pytest.raises(SerializationError, match="cannot build the object that arrived"):
        decode(open_body(wrong, CPU))


@given(VALUES, st.integers(0, 40))
def test_pieces_too_big_for_msgpack_go_beside_it(value: Any, largest: int) -> None:
    encoded = encode(value, largest=largest)
    assert typed(decode(open_body(encoded.body, CPU))) == typed(value)


def test_what_is_beside_is_moved_like_a_tensor() -> None:
    value: dict[Any, Any] = {
        "bytes": b"12" * 50_000,
        "text": "\u00e9" * 50_000,
        "items": (b"ab" * 40_000, bytearray(100_000), 2**70),
        "array": np.arange(20_000),
        ("k",): "v",
    }
    encoded = encode(value, largest=1000)
    assert len(encoded.buffers) == 5
    assert len(encoded.body) < 3000
    got = there_and_back_of(encoded.body, encoded.buffers)
    assert typed(got["items"]) == typed(value["items"])
    assert (got["bytes"], got["text"], list(got)) == (value["bytes"], value["text"], list(value))
    assert np.array_equal(got["array"], value["array"])
    got["array"][0] = 7  # its own memory, which can be written
    pickled = encode(value, pickle=True, largest=1000)
    restored: Any = decode(open_body(pickled.body, CPU), pickle=True)
    assert restored["bytes"] == value["bytes"]


class Job(msgspec.Struct):
    """With a tensor inside."""

    step: int
    hidden: torch.Tensor


def test_typed_values() -> None:
    body = open_body(encode_typed(Job(3, torch.ones(2))).body, CPU)
    got = decode_typed(body, Job)
    assert got.step == 3
    assert torch.equal(got.hidden, torch.ones(2))
    with pytest.raises(SerializationError, match="what arrived is no"):
        decode_typed(open_body(encode_typed({"step": "x"}).body, CPU), Job)
    with pytest.raises(SerializationError, match="cannot encode"):
        encode_typed(Job(2**70, torch.ones(1)))
