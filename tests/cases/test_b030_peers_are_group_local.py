"""B030: group-local and global ranks mixed up in src and dst."""

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError
from tests.spmd.worlds import MAKERS, World

KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))


@KINDS
def test_b030_every_group_counts_from_its_own_first_member(kind: str) -> None:
    def body(rank: int, groups: list[GroupCoordinator]) -> list[float]:
        (tp,) = groups
        mine = torch.tensor([float(rank)])
        seen = [tp.broadcast(mine, 0).item(), tp.broadcast(mine, 1).item(), tp.broadcast_object(rank, 1)]
        seen.append(tp.broadcast_tensor_dict({"x": mine}, 0)["x"].item())
        gathered = tp.gather(mine, 1)
        assert (gathered is None) == (tp.rank_in_group == 0)
        total, part = tp.reduce(mine, 1), tp.scatter(torch.stack([mine, mine + 50]), 1)
        assert (None if total is None else total.item()) == (None if tp.rank_in_group == 0 else sum(tp.ranks))
        assert part.item() == tp.ranks[1] + 50 * tp.rank_in_group
        seen.append(-1.0 if gathered is None else gathered[0].item())
        if tp.rank_in_group == 0:
            tp.send(mine, 1)
        else:
            seen[-1] += tp.recv(0).item()
        return seen

    pairs = [(0, 1), (2, 3)]
    results = World(kind).many(4, lambda rank: pairs, body)
    for first, second in pairs:
        assert results[first] == [first, second, second, first, -1.0]
        assert results[second] == [first, second, second, first, 2 * first]


@KINDS
@pytest.mark.parametrize(
    "operation",
    [
        *("broadcast", "broadcast_", "reduce", "gather", "scatter", "broadcast_object", "broadcast_tensor_dict", "exchange"),
        *("send", "isend", "send_object", "send_tensor_dict", "recv", "irecv", "recv_object", "recv_tensor_dict"),
    ],
)
def test_b030_a_peer_out_of_range_is_refused_on_all_members(kind: str, operation: str) -> None:
    def body(group: GroupCoordinator) -> float:
        mine = torch.ones(2)
        given = {"x": mine} if "dict" in operation else mine
        call = getattr(group, operation)
        for peer in (2, -1, True, "0"):
            with pytest.raises(ValueError, match=r"is not a member of .*group-local, 0 to 1"):
                call(peer) if "recv" in operation else call(given, peer)
        return group.all_reduce(mine)[0].item()

    assert World(kind)(2, body) == [2.0, 2.0]


@KINDS
def test_b030_a_group_keeps_the_order_it_was_given(kind: str) -> None:
    def body(group: GroupCoordinator) -> tuple[int, float, int, int]:
        value = group.broadcast(torch.tensor([float(group.rank)]), 0).item()
        return group.rank_in_group, value, group.next_rank, group.first_rank

    assert World(kind)(2, body, ranks=(3, 0)) == [(0, 3.0, 0, 3), (1, 3.0, 3, 3)]


@KINDS
def test_b030_a_rank_cannot_send_to_itself(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        with pytest.raises(ArgumentError, match="a rank cannot send to itself"):
            group.send(torch.ones(1), group.rank_in_group)
        with pytest.raises(ArgumentError, match="a rank cannot send to itself"):
            group.recv(group.rank_in_group)

    World(kind)(2, body)
    World(kind)(1, body)
