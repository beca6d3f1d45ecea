"""B047: a failure to encode an object leaves the peers hanging."""

import pickle
from typing import NoReturn

import pytest

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import PeerEncodingError, PeerFailedError, SerializationError
from tests.spmd.worlds import MAKERS, World

KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))


class _Elsewhere:
    """Pickles into something that cannot be imported where it arrives."""

    def __reduce__(self) -> tuple[object, ...]:
        return _missing, ()


def _missing() -> NoReturn:
    raise ImportError("no such class here")


class _Interrupts:
    def __reduce__(self) -> NoReturn:
        raise KeyboardInterrupt("in the middle of pickling")


@KINDS
def test_b047_the_receivers_learn_of_it_and_the_group_goes_on(kind: str) -> None:
    def body(group: GroupCoordinator) -> object:
        with pytest.raises(SerializationError, match=r"builtins.function") as caught:
            group.broadcast_object((lambda: 1) if group.is_first_rank else None)
        assert isinstance(caught.value, PeerFailedError) == (not group.is_first_rank)
        if group.is_first_rank:
            with pytest.raises(SerializationError, match=r"builtins.function"):
                group.send_object(lambda: 1)
        else:
            with pytest.raises(PeerEncodingError, match="member 0 could not encode its object"):
                group.recv_object()
        if group.is_first_rank:
            group.send_object("next")
        else:
            assert group.recv_object() == "next"
        return group.broadcast_object({"ok": 1})

    assert World(kind)(2, body) == [{"ok": 1}] * 2


@KINDS
def test_b047_all_gather_names_the_member(kind: str) -> None:
    def body(group: GroupCoordinator) -> list[object]:
        with pytest.raises(SerializationError, match="member 1"):
            group.all_gather_object((lambda: 1) if group.rank_in_group == 1 else 5)
        return group.all_gather_object(group.rank_in_group)

    assert World(kind)(3, body) == [[0, 1, 2]] * 3


@KINDS
def test_b047_what_cannot_be_built_fails_where_it_arrived(kind: str) -> None:
    def body(group: GroupCoordinator) -> object:
        if group.is_first_rank:
            group.broadcast_object(_Elsewhere(), pickle=True)
        else:
            with pytest.raises(SerializationError, match="cannot build the object that arrived: ImportError"):
                group.broadcast_object(None, pickle=True)
        return group.broadcast_object("fine")

    assert World(kind)(2, body) == ["fine"] * 2


@KINDS
def test_b047_an_interrupt_while_encoding_sends_no_half_message(kind: str) -> None:
    def body(group: GroupCoordinator) -> object:
        if group.is_first_rank:
            with pytest.raises(KeyboardInterrupt):
                group.broadcast_object(_Interrupts(), pickle=True)
        else:
            with pytest.raises(PeerEncodingError, match="KeyboardInterrupt"):
                group.broadcast_object(None, pickle=True)
        return group.broadcast_object("fine")

    assert World(kind)(2, body) == ["fine"] * 2


@KINDS
def test_b047_pickle_is_opt_in_on_both_sides(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        assert group.broadcast_object(pickle.PicklingError, pickle=True) is pickle.PicklingError
        if group.is_first_rank:
            group.send_object(frozenset, pickle=True)
        else:
            with pytest.raises(SerializationError, match="receive it with pickle=True"):
                group.recv_object()

    World(kind)(2, body)
