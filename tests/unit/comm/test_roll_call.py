"""What gloo does not compare: found before anything moves, named on every member, and the group goes on."""

from collections.abc import Callable

import pytest
import torch

from parallel_runtime.comm import C10dCommunicator, GroupCoordinator
from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.comm.roll_call import Entered, RollCall
from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import CollectiveMismatchError, PeerError
from parallel_runtime.launch import run_threads
from tests.spmd.worlds import World

pytestmark = pytest.mark.timeout(60)

Way = Callable[[GroupCoordinator, bool], object]
LARGE = 10_000
"""More than a row has room for."""

WAYS: dict[str, tuple[Way, str]] = {
    "shape": (lambda g, odd: g.all_reduce(torch.ones(4 if odd else 3)), r"rank 1 entered all_reduce sum float32\[4\]"),
    "large shape": (lambda g, odd: g.all_gather(torch.ones(LARGE + odd)), r"all_gather float32\[10001\]"),
    "small and large": (lambda g, odd: g.broadcast(torch.ones(LARGE if odd else 1)), r"rank 1 .*from member 0 float32\[10000\]"),
    "same size": (lambda g, odd: g.all_reduce(torch.ones((2, 3) if odd else (3, 2))), r"float32\[2, 3\]"),
    "dtype": (lambda g, odd: g.gather(torch.ones(2, dtype=torch.int32 if odd else torch.float32)), "to member 0 int32"),
    "op": (lambda g, odd: g.all_reduce(torch.ones(2), "max" if odd else "sum"), "rank 1 entered all_reduce max"),
    "root": (lambda g, odd: g.reduce(torch.ones(2), dst=int(odd)), "rank 1 entered reduce to member 1"),
    "operation": (lambda g, odd: g.barrier() if odd else g.reduce_scatter(torch.ones(6)), "rank 1 entered barrier"),
    "message": (lambda g, odd: g.all_reduce(torch.ones(1)) if odd else g.broadcast_object("x"), "entered broadcast_bytes"),
    "exchange": (lambda g, odd: g.barrier() if odd else g.all_to_all(torch.ones(6, 3)), "rank 0 entered all_to_all of float32"),
}


def error_of(body: Callable[[], object]) -> PeerError:
    with pytest.raises(PeerError) as caught:
        body()
    return caught.value


@pytest.mark.parametrize("what", WAYS)
def test_what_one_member_enters_otherwise_is_told_to_all(what: str) -> None:
    way, text = WAYS[what]

    def body(group: GroupCoordinator) -> float:
        with pytest.raises(CollectiveMismatchError, match=text):
            way(group, group.rank == 1)
        return float(group.all_reduce(torch.ones(1)))

    assert World("gloo")(3, body) == [3.0, 3.0, 3.0]


def test_between_hosts_the_leaders_compare() -> None:
    """Ranks 0 and 2 share a host, rank 1 is alone on its own."""

    def body(group: GroupCoordinator) -> tuple[type[PeerError], str]:
        tensor = torch.ones(LARGE + (group.rank == 1))
        error = error_of(lambda: group.all_reduce(tensor))
        return type(error), str(error)

    told = World("hosts")(3, body)
    assert [kind for kind, _ in told[:2]] == [CollectiveMismatchError] * 2
    assert all("rank 0 entered all_reduce sum float32[10000]; rank 1 entered" in text for _, text in told[:2]), told


def test_blame_crosses_hosts() -> None:
    """The host of the source is done with its part; the leaders blame all members of the other host."""

    def body(group: GroupCoordinator) -> tuple[int, ...] | None:
        communicator = group._core.communicator
        for tensor in (torch.ones(1), torch.ones(LARGE)):
            communicator.all_reduce_(tensor, ReduceOp.SUM, 20)
        try:
            communicator.broadcast_(torch.ones(1 + (group.rank == 1)), 0, 20)
        except CollectiveMismatchError as error:
            return error.members
        return None

    assert World("hosts")(3, body) == [(1,), (0, 2), None]


def test_positions_on_a_host_are_told_as_those_in_the_group() -> None:
    """Ranks 0 and 2 share memory, as members 0 and 1 of their host."""

    def body(group: GroupCoordinator) -> tuple[int, ...]:
        communicator = group._core.communicator
        return error_of(lambda: communicator.all_reduce_(torch.ones(1 + (group.rank == 2)), ReduceOp.SUM, 20)).members

    first, _, third = World("hosts")(3, body)
    assert (first, third) == ((2,), (0,))


def test_an_exchange_whose_sizes_do_not_fit() -> None:
    def body(group: GroupCoordinator) -> tuple[int, ...]:
        taken = [2, 2, 3] if group.rank == 1 else [2, 2, 2]
        communicator = group._core.communicator
        with pytest.raises(
            CollectiveMismatchError, match="all_to_all: rank 1 takes 3 elements from rank 2, which sends 2"
        ) as caught:
            communicator.all_to_allv([torch.empty(count) for count in taken], [torch.ones(2)] * 3, 20)
        assert group.all_reduce(torch.ones(1)) == 3
        return caught.value.members

    assert World("gloo")(3, body) == [(1, 2), (2,), (1,)]


def test_sizes_that_fit_in_no_row_are_compared_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel_runtime.comm.roll_call._LARGEST_ROW", 64)

    def body(group: GroupCoordinator) -> list[float]:
        communicator = group._core.communicator
        sizes = [3, 1, 1] if group.rank == 1 else [1, 1, 1]
        with pytest.raises(CollectiveMismatchError, match="takes 3 elements from rank 0"):
            communicator.all_to_allv([torch.empty(size) for size in sizes], [torch.ones(1)] * 3, 20)
        assert group.broadcast_object("long" * 99 if group.rank == 0 else None) == "long" * 99
        return group.all_to_all(torch.full((3,), float(group.rank))).tolist()

    assert World("gloo")(3, body) == [[0.0, 1.0, 2.0]] * 3


def test_a_member_that_is_one_operation_ahead() -> None:
    def body(group: GroupCoordinator) -> str:
        group._core.traffic.steps += group.rank
        return str(error_of(group.barrier))

    assert all(
        "rank 0 entered barrier as its no. 1; rank 1 entered barrier as its no. 2" in text for text in World("gloo")(2, body)
    )


def test_a_long_text_is_cut() -> None:
    calls = [RollCall(member, range(2)) for member in range(2)]

    def exchange(rows: torch.Tensor, mine: torch.Tensor) -> None:
        rows[0].copy_(mine[0])
        rows[1].copy_(mine[0])
        rows[1, [0, 32]] += 1  # the other one says something else

    with pytest.raises(CollectiveMismatchError, match=r"entered x{253}\.\.\.;"):
        calls[0].call(Entered("x" * 500), 0, None, exchange)


@pytest.mark.parametrize("checked", ["auto", False])
def test_the_config_decides(checked: bool | str) -> None:
    """Without it, gloo lets each member reduce in its own way."""
    config = ParallelConfig.model_validate({"tp": 2, "backend": "gloo", "shm": "off", "checked": checked})
    config = config.replace(deadlines=Deadlines(collective_s=20))

    def body(ctx: ParallelContext) -> tuple[int, ...]:
        try:
            ctx.tp.all_reduce(torch.ones(2), "sum" if ctx.rank else "max")
        except CollectiveMismatchError as error:
            return error.ranks
        return ()

    assert run_threads(body, config, timeout_s=50) == ([(1,), (0,)] if checked else [(), ()])


def test_what_is_small_travels_in_the_call() -> None:
    """No second operation of gloo: the call is all there is."""

    def body(group: GroupCoordinator) -> None:
        communicator = group._core.communicator
        assert isinstance(communicator, C10dCommunicator)
        backend = communicator._group

        class _Counting:
            def __getattr__(self, name: str) -> object:
                assert name == "alltoall_base", name
                return backend.alltoall_base

        communicator._group = _Counting()
        try:
            group.all_reduce(torch.ones(1000))
            group.all_gather(torch.ones(1000))
            group.broadcast(torch.ones(1000))
            group.reduce(torch.ones(1000), 0)
            group.gather(torch.ones(1000), 0)
            group.reduce_scatter(torch.ones(1000))
            group.broadcast_object("x")
            group.barrier()
        finally:
            communicator._group = backend

    World("gloo")(2, body)
