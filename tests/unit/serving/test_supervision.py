"""When a replica counts as lost, and when it starts again, on a clock of the test."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.serving.supervision import ReplicaLife, ReplicaState, Supervision

RULES = Supervision(health_s=8.0, start_s=20.0, backoff_s=1.0, longest_backoff_s=5.0, stable_s=100.0)


def serving(now: float = 0.0, *, leaders: int = 1) -> ReplicaLife:
    life = ReplicaLife(RULES, max_restarts=4, num_leaders=leaders)
    life.start(now)
    life.serve(now)
    return life


def test_leaders_that_answer_are_well() -> None:
    life = serving(leaders=2)
    for now in range(100):
        if life.asks(float(now)):
            life.hear(0)
            life.hear(1)
        assert life.problem(float(now)) == ""


def test_one_leader_that_does_not_answer_is_named() -> None:
    life, asked = serving(leaders=2), []
    for now in range(12):
        if life.asks(float(now)):
            asked.append(now)
            life.hear(0)
        problem = life.problem(float(now))
        assert problem == ("leader 1 has not answered for 8 s (health_s)" if now > 10 else "")
    assert asked == [2, 4, 6, 8, 10]


def test_one_that_is_busy_has_longer() -> None:
    life = serving()
    assert life.asks(2.0)
    assert (life.problem(11.0, is_busy=True), life.problem(602.0, is_busy=True)) == ("", "")
    assert life.problem(603.0, is_busy=True) == "leader 0 has not answered for 600 s (longest_control_s)"
    life.hear(0)
    assert life.problem(603.0) == "", "its answer ends that too"


def test_nobody_is_late_who_was_not_asked() -> None:
    """As after this process itself was stopped for long."""
    life = serving()
    assert life.problem(1000.0) == ""
    assert life.asks(1000.0)
    assert life.problem(1008.0) == ""


def test_a_start_that_takes_too_long() -> None:
    life = ReplicaLife(RULES, max_restarts=0)
    life.start(5.0)
    assert not life.asks(24.0), "it may be reading its weights"
    assert (life.problem(25.0), life.problem(25.1)) == ("", "it does not serve 20 s after its start (start_s)")


def test_pauses_double_up_to_the_longest_and_end() -> None:
    life, pauses = ReplicaLife(RULES, max_restarts=4), []
    while life.state is not ReplicaState.LOST:
        life.start(0.0)
        pauses.append(life.fail(0.0))
    assert pauses == [1.0, 2.0, 4.0, 5.0, None]
    with pytest.raises(ArgumentError, match="a replica that is lost cannot become starting"):
        life.start(0.0)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 300.0)), max_size=12))
def test_only_failures_in_a_row_count(lives: list[tuple[bool, float]]) -> None:
    life, in_a_row = ReplicaLife(RULES, max_restarts=100), 0
    for serves, seconds in lives:
        life.start(0.0)
        if serves:
            life.serve(0.0)
        in_a_row = 1 if serves and seconds >= 100.0 else in_a_row + 1
        assert life.fail(seconds) == min(5.0, 2.0 ** (in_a_row - 1))
        assert life.num_failures == in_a_row


def test_an_end_as_planned_is_no_failure() -> None:
    life = serving()
    life.rest(1.0)
    assert (life.state, life.num_failures) == (ReplicaState.RESTING, 0)


def test_what_would_end_alike_is_not_tried_again() -> None:
    life = ReplicaLife(RULES, max_restarts=4)
    life.start(0.0)
    assert life.fail(0.0, is_final=True) is None
    assert life.state is ReplicaState.LOST


@pytest.mark.parametrize(("given", "count", "expected"), [(None, 1, 0), (None, 2, 3), (7, 1, 7), (0, 2, 0)])
def test_restarts_follow_from_the_number_of_replicas(given: int | None, count: int, expected: int) -> None:
    assert Supervision(max_restarts=given).restarts_of(count) == expected


@pytest.mark.parametrize("name", ["health_s", "start_s", "max_runs"])
def test_settings_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0 should be greater than"):
        Supervision(**{name: 0})


@pytest.mark.parametrize(("health_s", "expected"), [(30.0, 0.5), (4.0, 0.2), (0.2, 0.1)])
def test_it_is_looked_at_less_often_while_it_serves(health_s: float, expected: float) -> None:
    life = ReplicaLife(Supervision(health_s=health_s), max_restarts=0)
    life.start(0.0)
    assert life.look_again_s == 0.1
    life.serve(1.0)
    assert life.look_again_s == expected
