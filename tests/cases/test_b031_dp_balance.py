"""B031: requests pile up on one data-parallel rank."""

from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing import Pipe

import pytest

from parallel_runtime.serving import DataParallelController
from parallel_runtime.serving.balancer import BalancePolicy, Balancer
from parallel_runtime.serving.messages import FinishReason
from tests.unit.serving.test_controller import Stage, end, make


def test_b031_in_flight_is_counted_at_dispatch() -> None:
    for num_workers, expected in ((2, [5, 5]), (3, [3, 3, 4])):
        balancer = Balancer(num_workers, policy=BalancePolicy.LEAST_REQUESTS)
        for index in range(10):
            balancer.assign(str(index))
        assert sorted(balancer.requests) == expected


def test_b031_round_robin_is_strictly_cyclic() -> None:
    balancer = Balancer(3, policy=BalancePolicy.ROUND_ROBIN)
    chosen = []
    for index in range(9):
        chosen.append(balancer.assign(str(index)))
        if index in (2, 4, 7):
            assert balancer.release(str(index - 1))
    assert chosen == [0, 1, 2] * 3


def test_b031_a_long_request_is_alone() -> None:
    balancer = Balancer(2, policy=BalancePolicy.LEAST_TOKENS)
    workers = [balancer.assign(str(index), num_tokens=length) for index, length in enumerate((100, 1, 1, 1, 1))]
    assert workers == [0, 1, 1, 1, 1]


def test_b031_finish_and_abort_count_once() -> None:
    balancer = Balancer(2)
    balancer.assign("a", num_tokens=5)
    assert balancer.release("a")  # finished
    assert not balancer.release("a")  # and aborted
    assert balancer.requests == balancer.tokens == (0, 0)


@pytest.fixture(params=[2, 3])
def leaders(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A controller, and leaders that say nothing by themselves."""
    with ExitStack() as stack:
        pairs = [
            (stack.enter_context(front), stack.enter_context(leader)) for front, leader in (Pipe() for _ in range(request.param))
        ]
        yield Stage(DataParallelController([front for front, _ in pairs]), [leader for _, leader in pairs])


def test_b031_the_controller_counts_what_it_sent_and_no_end_twice(leaders: Stage) -> None:
    controller, num_workers = leaders.controller, len(leaders.leaders)
    went = [controller.submit(make(f"r{index}"), leaders.sink) for index in range(10)]
    fair = [len(range(rank, 10, num_workers)) for rank in range(num_workers)]
    assert list(controller.requests_per_rank) == fair
    assert [went.count(rank) for rank in range(num_workers)] == fair
    controller.abort("r0")
    leaders.say(0, end("r0", 1), end("r0", reason=FinishReason.ABORT))
    controller.abort("r0")
    assert list(controller.requests_per_rank) == [fair[0] - 1, *fair[1:]]
    assert [name for name, _ in leaders.delivered()] == ["r0"]
