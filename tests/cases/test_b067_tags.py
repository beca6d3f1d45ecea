"""B067: tags are ignored, or messages meet the wrong receive."""

import random
import threading

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError, PeerError
from tests.spmd.worlds import MAKERS, World

KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))


def send(group: GroupCoordinator, what: str, tag: int, value: int) -> None:
    if what == "object":
        group.send_object(value, tag=tag)
    elif what == "tensor":
        group.isend(torch.tensor([value]), tag=tag)
    else:
        group.isend_tensor_dict({"v": torch.tensor([value])}, tag=tag)


def receive(group: GroupCoordinator, what: str, tag: int) -> object:
    if what == "object":
        return group.recv_object(tag=tag)
    return group.recv(tag=tag).item() if what == "tensor" else group.recv_tensor_dict(tag=tag)["v"].item()


@KINDS
def test_b067_receives_match_by_tag(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        if group.is_first_rank:
            handles = [group.isend(torch.tensor([float(tag)]), tag=tag) for tag in (1, 2)]
            for handle in handles:
                handle.wait()
        else:
            assert group.recv(tag=2).item() == 2
            assert group.recv(tag=1).item() == 1

    World(kind)(2, body)


@KINDS
def test_b067_two_lines_of_mixed_messages_never_mix(kind: str) -> None:
    plan = [(line, what, step) for step in range(20) for line in (1, 2) for what in ("object", "tensor", "dict")]
    sending = random.Random(1).sample(plan, len(plan))
    receiving = random.Random(2).sample(plan, len(plan))

    def in_order(order: list[tuple[int, str, int]]) -> list[tuple[int, str, int]]:
        """The drawn order, with the steps of each (line, kind) counted up."""
        seen: dict[tuple[int, str], int] = {}
        steps = []
        for line, what, _ in order:
            seen[line, what] = seen.get((line, what), -1) + 1
            steps.append((line, what, seen[line, what]))
        return steps

    def body(group: GroupCoordinator) -> None:
        for line, what, step in in_order(sending if group.is_first_rank else receiving):
            tag, value = line * 2 + (what == "dict"), line * 1000 + step
            if group.is_first_rank:
                send(group, what, tag, value)
            else:
                assert receive(group, what, tag) == value

    World(kind)(2, body)


@KINDS
def test_b067_nothing_was_sent(kind: str) -> None:
    done = threading.Event()

    def body(group: GroupCoordinator) -> None:
        if group.is_last_rank:
            with pytest.raises(PeerError, match=r"g0-1 seq \d+ recv\(\): .*(member|rank) 0.* with tag 5"):
                group.recv(tag=5, timeout_s=0.5)
            with pytest.raises(PeerError, match=r"nothing more can be received from member 0, tag 5|can no longer be used"):
                group.recv(tag=5)
            done.set()
        else:
            assert done.wait(30)

    World(kind)(2, body)


@KINDS
@pytest.mark.parametrize("tag", [-1, 2**24, True, "1"])
def test_b067_tags_out_of_range(kind: str, tag: int) -> None:
    def body(group: GroupCoordinator) -> None:
        for call in (
            lambda: group.recv(tag=tag),
            lambda: group.isend(torch.ones(1), tag=tag),
            lambda: group.send_object(1, tag=tag),
        ):
            with pytest.raises(ArgumentError, match="must be an int from 0 to 16777215"):
                call()

    World(kind)(2, body)
