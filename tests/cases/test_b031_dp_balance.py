"""B031: requests pile up on one data-parallel rank."""

from parallel_runtime.serving.balancer import BalancePolicy, Balancer


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
