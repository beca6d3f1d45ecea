"""B045: nested containers in a tensor dict."""

from typing import Any

import numpy as np
import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError, PeerEncodingError, SerializationError
from tests.spmd.worlds import MAKERS, World

KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))


def nested() -> dict[Any, Any]:
    def tensor(start: int) -> torch.Tensor:
        return torch.arange(start, start + 6.0).view(2, 3).t()

    return {
        "a": {"b": tensor(0), "c": [tensor(1), tensor(2)]},
        "t": (tensor(3), 1),
        "n": 3,
        "s": "x",
        "none": None,
        "e": {},
        "l": [],
        "a.b": tensor(4),
        "a%b": tensor(5),
        "": tensor(6),
        "big": torch.arange(40_000.0),
        7: "an int key",
        ("x", 1): {1, 2},
    }


def assert_equal(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            assert_equal(got[key], want[key])
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_equal(one, other)
    elif isinstance(want, torch.Tensor):
        assert torch.equal(got, want)
    else:
        assert got == want


@KINDS
def test_b045_structure_order_and_values_arrive(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        assert_equal(group.broadcast_tensor_dict(nested() if group.is_first_rank else None), nested())
        if group.is_first_rank:
            group.send_tensor_dict(nested())
        else:
            assert_equal(group.recv_tensor_dict(), nested())
        assert_equal(group.broadcast_object(nested(), 1), nested())
        for got in group.all_gather_object(nested()):
            assert_equal(got, nested())

    World(kind)(2, body)


@KINDS
def test_b045_shared_tensors_grads_and_numpy_scalars(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        shared = torch.ones(3, requires_grad=True)
        sent = {"x": shared, "y": [shared], "scalar": np.float32(1.5), "array": np.arange(4).reshape(2, 2)}
        ways = [group.broadcast_tensor_dict(sent, 0)]
        if group.is_first_rank:
            group.send_tensor_dict(sent)
        else:
            ways.append(group.recv_tensor_dict())
        for got in ways if group.is_last_rank else ():
            assert got["x"] is got["y"][0]
            assert not got["x"].requires_grad
            assert type(got["scalar"]) is np.float32
            assert got["scalar"] == 1.5
            assert got["array"].tolist() == [[0, 1], [2, 3]]

    World(kind)(2, body)


@KINDS
def test_b045_empty_is_not_none(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        assert group.broadcast_tensor_dict({} if group.is_first_rank else None) == {}
        if group.is_first_rank:
            group.send_tensor_dict({})
        else:
            assert group.recv_tensor_dict() == {}
        expected = ArgumentError if group.is_first_rank else PeerEncodingError
        with pytest.raises(expected, match="expected a dict, got NoneType"):
            group.broadcast_tensor_dict(None)
        if group.is_first_rank:
            with pytest.raises(ArgumentError, match="expected a dict, got list"):
                group.send_tensor_dict([])  # type: ignore[arg-type]
        else:
            with pytest.raises(PeerEncodingError, match="expected a dict, got list"):
                group.recv_tensor_dict()
        assert group.broadcast_tensor_dict({"a": 1}) == {"a": 1}

    World(kind)(2, body)


@KINDS
def test_b045_keys_that_cannot_travel_are_refused_before_anything_is_sent(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        with pytest.raises(SerializationError, match=r"object of type builtins.object"):
            group.broadcast_tensor_dict({object(): torch.ones(1)})
        assert group.broadcast_tensor_dict({"ok": 1}) == {"ok": 1}

    World(kind)(2, body)
