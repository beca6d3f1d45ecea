"""The balancer against counting by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.errors import ArgumentError
from parallel_runtime.serving.balancer import BalancePolicy, Balancer


@given(
    st.sampled_from(list(BalancePolicy)), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40)
)
def test_counts_are_what_is_in_flight(policy: BalancePolicy, num_workers: int, events: list[tuple[int, bool]]) -> None:
    balancer = Balancer(num_workers, policy=policy)
    held: dict[str, tuple[int, int]] = {}
    for index, (number, is_new) in enumerate(events):
        if is_new or not held:
            name = str(index)
            held[name] = (balancer.assign(name, num_tokens=number), number)
        else:
            name = sorted(held)[number % len(held)]
            assert balancer.worker_of(name) == held.pop(name)[0]
            assert balancer.release(name)
            assert not balancer.release(name)
            assert balancer.worker_of(name) is None
        assert balancer.requests == tuple(sum(worker == w for w, _ in held.values()) for worker in range(num_workers))
        assert balancer.tokens == tuple(sum(n for w, n in held.values() if w == worker) for worker in range(num_workers))


def test_light_load_rotates() -> None:
    balancer = Balancer(3)
    chosen = []
    for index in range(6):
        chosen.append(balancer.assign(str(index)))
        balancer.release(str(index))
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="num_workers=0"):
        Balancer(0)
    balancer = Balancer(1)
    balancer.assign("a")
    with pytest.raises(ArgumentError, match="'a' is under way on worker 0 already"):
        balancer.assign("a")
    with pytest.raises(ArgumentError, match="cannot have -1 tokens"):
        balancer.assign("b", num_tokens=-1)
    assert balancer.requests == (1,)
    with pytest.raises(ArgumentError, match="no worker may have request 'b'; name at least one of 1"):
        balancer.assign("b", among=[])


@given(st.sampled_from(list(BalancePolicy)), st.lists(st.sets(st.integers(0, 3), min_size=1), max_size=20))
def test_only_workers_that_may_are_chosen(policy: BalancePolicy, allowed: list[set[int]]) -> None:
    balancer = Balancer(4, policy=policy)
    for index, among in enumerate(allowed):
        worker = balancer.assign(str(index), prompt=range(32), among=sorted(among))
        assert worker in among
        if policy is BalancePolicy.LEAST_REQUESTS:
            assert balancer.requests[worker] - 1 == min(balancer.requests[w] - (w == worker) for w in among)


def test_a_prompt_goes_where_its_beginning_is_known() -> None:
    balancer = Balancer(3, policy=BalancePolicy.PREFIX_AFFINITY)
    shared, other = tuple(range(40)), tuple(range(100, 140))
    assert [balancer.assign(str(n), prompt=(*prompt, n)) for n, prompt in enumerate((shared, other, shared))] == [0, 1, 0]
    assert balancer.assign("short", prompt=shared[:10]) == 2, "less than a block says nothing"
    assert balancer.assign("first block", prompt=(*shared[:16], *other)) == 0
    assert balancer.assign("not allowed", prompt=shared, among=[1, 2]) in (1, 2)
    balancer.forget(1)
    assert balancer.assign("forgotten", prompt=other) == 2


def test_a_known_beginning_does_not_pile_requests_up() -> None:
    balancer = Balancer(2, policy=BalancePolicy.PREFIX_AFFINITY)
    for number in range(40):
        balancer.assign(str(number), prompt=range(64))
    assert sum(balancer.requests) == 40
    assert max(balancer.requests) - min(balancer.requests) <= 5
