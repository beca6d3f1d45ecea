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
