"""The scheduling policy, step by step."""

import msgspec
import pytest

from parallel_runtime.errors import ArgumentError, QueueFullError, RequestError
from parallel_runtime.serving.batch import Batch
from parallel_runtime.serving.live_request import TRANSITIONS, RequestState
from parallel_runtime.serving.messages import FinishReason, Request, StepOutput
from parallel_runtime.serving.policy import PolicyLimits, SchedulingPolicy
from parallel_runtime.serving.sampling_params import SamplingParams


def make(name: str, prompt: int, new: int = 4, stop: tuple[int, ...] = (), priority: int = 0) -> Request:
    sampling = SamplingParams(max_new_tokens=new, stop_token_ids=stop)
    return Request(request_id=name, prompt=tuple(range(prompt)), sampling=sampling, priority=priority)


def make_policy(*, prefix_reuse: bool = False, **limits: int) -> SchedulingPolicy:
    values = {"num_blocks": 100, "page_size": 4, "max_batch_tokens": 64, "max_batch_requests": 8, "max_request_tokens": 400}
    return SchedulingPolicy(PolicyLimits(prefix_reuse=prefix_reuse, **values | limits))


def shape(batch: Batch) -> list[tuple[str, int, int, bool]]:
    return [(chunk.request_id, chunk.start, len(chunk.token_ids), chunk.is_sampled) for chunk in batch.chunks]


def turn(policy: SchedulingPolicy, token: int = 7) -> tuple[Batch, list[StepOutput]]:
    batch = policy.schedule()
    return batch, policy.complete([token] * len(batch.sampled)) if batch.chunks else []


def test_prefill_then_decode_until_the_length_is_reached() -> None:
    policy = make_policy()
    policy.add(make("a", 5, new=3))
    assert policy.state("a") is RequestState.WAITING
    batch, outputs = turn(policy)
    assert shape(batch) == [("a", 0, 5, True)]
    assert batch.chunks[0].blocks == (0, 1)
    assert outputs == [StepOutput("a", (7,))]
    assert policy.state("a") is RequestState.DECODE
    batch, _ = turn(policy, 8)
    assert shape(batch) == [("a", 5, 1, True)]
    assert batch.chunks[0].token_ids == (7,)
    _, outputs = turn(policy, 9)
    assert outputs == [StepOutput("a", (9,), FinishReason.LENGTH)]
    assert policy.is_idle
    assert policy.num_free_blocks == 100


def test_a_stop_token_ends_and_is_returned() -> None:
    policy = make_policy()
    policy.add(make("a", 2, new=9, stop=(7,)))
    _, outputs = turn(policy, 7)
    assert outputs == [StepOutput("a", (7,), FinishReason.STOP)]
    assert policy.state("a") is None


def test_a_request_goes_on_after_what_another_replica_made() -> None:
    policy = make_policy()
    policy.add(msgspec.structs.replace(make("a", 3, new=4), made=(7, 8)))
    batch, outputs = turn(policy, 9)
    assert batch.chunks[0].token_ids == (0, 1, 2, 7, 8)
    assert outputs == [StepOutput("a", (9,))]
    assert turn(policy, 6)[1] == [StepOutput("a", (6,), FinishReason.LENGTH)]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    policy = make_policy(max_batch_tokens=8)
    policy.add(make("a", 18))
    shapes = [shape(turn(policy)[0]) for _ in range(4)]
    assert shapes == [[("a", 0, 8, False)], [("a", 8, 8, False)], [("a", 16, 2, True)], [("a", 18, 1, True)]]


def test_new_requests_join_those_that_run() -> None:
    policy = make_policy()
    policy.add(make("a", 4))
    turn(policy)
    policy.add(make("b", 6))
    assert shape(turn(policy)[0]) == [("a", 4, 1, True), ("b", 0, 6, True)]


def test_the_number_of_running_requests_is_bounded() -> None:
    policy = make_policy(max_batch_requests=2)
    for name in "abc":
        policy.add(make(name, 3, new=2))
    assert [chunk.request_id for chunk in turn(policy)[0].chunks] == ["a", "b"]
    assert (policy.num_running, policy.num_waiting) == (2, 1)
    turn(policy)
    assert [chunk.request_id for chunk in turn(policy)[0].chunks] == ["c"]


def test_the_newest_is_put_back_when_blocks_run_out_and_computed_again() -> None:
    policy = make_policy(num_blocks=4)
    policy.add(make("a", 7, new=9))
    policy.add(make("b", 7, new=4))
    turn(policy)
    turn(policy)
    assert policy.num_free_blocks == 0
    batch, _ = turn(policy)
    assert shape(batch) == [("a", 8, 1, True)]
    assert policy.state("b") is RequestState.WAITING
    while policy.state("a") is not None:
        assert shape(turn(policy)[0])[0][0] == "a"
    batch, _ = turn(policy)
    assert shape(batch) == [("b", 0, 9, True)]
    assert batch.chunks[0].token_ids == (*range(7), 7, 7)


def test_one_that_gets_no_block_keeps_its_own_and_waits() -> None:
    policy = make_policy(num_blocks=4)
    policy.add(make("a", 4, new=2))
    policy.add(make("b", 12, new=4))
    batch, _ = turn(policy)
    assert shape(batch) == [("a", 0, 4, True), ("b", 0, 12, True)]
    policy.abort("a")
    policy.add(make("c", 3, new=2))
    batch = policy.schedule()
    assert shape(batch) == [("b", 12, 1, True)]


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_abort_in_every_state_frees_the_blocks(turns: int) -> None:
    policy = make_policy(max_batch_tokens=8)
    policy.add(make("a", 12, new=50))
    for _ in range(turns):
        turn(policy)
    assert policy.abort("a")
    assert not policy.abort("a")
    assert policy.is_idle
    assert policy.num_free_blocks == 100
    assert not policy.abort("never seen")


def test_the_result_of_an_aborted_request_is_dropped_even_when_its_name_comes_back() -> None:
    policy = make_policy()
    policy.add(make("a", 4))
    policy.add(make("b", 4))
    policy.schedule()
    assert policy.abort("a")
    policy.add(make("a", 6))
    assert policy.complete([1, 2]) == [StepOutput("b", (2,))]
    assert shape(policy.schedule()) == [("b", 4, 1, True), ("a", 0, 6, True)]


def test_those_alive_are_named_in_order_of_arrival() -> None:
    policy = make_policy(max_batch_requests=2)
    for name in "cab":
        policy.add(make(name, 3))
    turn(policy)
    assert list(policy.alive) == ["c", "a", "b"]
    policy.abort("a")
    assert list(policy.alive) == ["c", "b"]


def test_two_slots_share_the_requests_and_never_one_request() -> None:
    policy = make_policy(num_slots=2)
    for name in "abc":
        policy.add(make(name, 3))
    first, second = policy.schedule(), policy.schedule()
    assert [chunk.request_id for chunk in first.chunks] == ["a", "b"]
    assert [chunk.request_id for chunk in second.chunks] == ["c"]
    with pytest.raises(ArgumentError, match="2 batches are under way and num_slots=2"):
        policy.schedule()
    assert [output.request_id for output in policy.complete([1, 2])] == ["a", "b"]
    assert shape(policy.schedule()) == [("a", 3, 1, True), ("b", 3, 1, True)]
    assert [output.token_ids for output in policy.complete([3])] == [(3,)]


def test_one_in_a_batch_under_way_is_never_put_back() -> None:
    policy = make_policy(num_blocks=4, num_slots=2, max_batch_requests=2)
    policy.add(make("a", 7, new=9))
    policy.add(make("b", 8, new=8))
    assert [chunk.request_id for chunk in policy.schedule().chunks] == ["a"]
    assert [chunk.request_id for chunk in policy.schedule().chunks] == ["b"]
    policy.complete([1])
    assert shape(policy.schedule()) == [("a", 7, 1, True)]
    policy.complete([1])
    policy.complete([1])
    policy.schedule()  # a needs a third block and takes both of b, which is not under way now
    assert policy.state("b") is RequestState.WAITING


def test_the_oldest_waits_for_the_newest_that_is_under_way() -> None:
    policy = make_policy(num_blocks=4, num_slots=2, max_batch_requests=2)
    policy.add(make("a", 8, new=8))
    policy.add(make("b", 8, new=8))
    policy.schedule()
    policy.schedule()
    policy.complete([1])
    assert policy.schedule().chunks == ()
    assert (policy.state("a"), policy.state("b")) == (RequestState.DECODE, RequestState.PREFILL)


def test_those_put_back_are_first_again_in_their_old_order() -> None:
    policy = make_policy(num_blocks=3, max_batch_requests=3)
    for name in "abc":
        policy.add(make(name, 4, new=5))
    policy.add(make("d", 4, new=5))
    turn(policy)  # every block is taken
    assert [chunk.request_id for chunk in turn(policy)[0].chunks] == ["a"]
    served = []
    while not policy.is_idle:
        served += [chunk.request_id for chunk in turn(policy)[0].chunks if chunk.start == 0]
    assert served == ["c", "d"]


def test_a_full_queue_refuses_at_once() -> None:
    policy = make_policy(max_waiting=2)
    policy.add(make("a", 3))
    policy.add(make("b", 3))
    with pytest.raises(QueueFullError, match="'c' refused: 2 requests wait already and max_waiting=2"):
        policy.add(make("c", 3))
    with pytest.raises(QueueFullError, match="3 requests wait"):
        policy.check(make("c", 3), num_ahead=1)
    turn(policy)
    policy.add(make("c", 3))


def test_requests_that_never_fit() -> None:
    policy = make_policy(num_blocks=3, max_request_tokens=40)
    with pytest.raises(RequestError, match="10 prompt tokens and asks for 4 new ones, 14 together; this replica holds 12"):
        policy.add(make("a", 10))
    with pytest.raises(RequestError, match="holds 10"):
        make_policy(max_request_tokens=10).add(make("a", 10))
    policy.add(make("a", 3))
    with pytest.raises(RequestError, match="'a' is alive already"):
        policy.add(make("a", 3))


def test_results_that_do_not_belong_are_refused() -> None:
    policy = make_policy()
    with pytest.raises(ArgumentError, match="no batch is under way"):
        policy.complete([])
    assert policy.schedule().chunks == ()
    policy.add(make("a", 3))
    policy.schedule()
    with pytest.raises(ArgumentError, match="got 2 sampled tokens for a batch that samples 1"):
        policy.complete([1, 2])
    assert policy.complete([1]) == [StepOutput("a", (1,))]


def test_a_beginning_that_is_known_is_not_computed_again() -> None:
    policy = make_policy(prefix_reuse=True)
    policy.add(make("a", 9, new=1))
    first, _ = turn(policy)
    assert (policy.num_cached_blocks, policy.num_free_blocks) == (2, 100)
    policy.add(make("b", 11, new=1))
    second, _ = turn(policy)
    assert shape(second) == [("b", 8, 3, True)]
    assert second.chunks[0].blocks[:2] == first.chunks[0].blocks[:2]
    assert policy.num_reused_tokens == 8


def test_one_token_at_least_is_computed_in_a_block_of_its_own() -> None:
    policy = make_policy(prefix_reuse=True)
    for name in "ab":
        policy.add(make(name, 8, new=1))
    batch, _ = turn(policy)
    assert shape(batch) == [("a", 0, 8, True), ("b", 4, 4, True)]
    assert [chunk.blocks for chunk in batch.chunks] == [(0, 1), (0, 2)]


def test_what_was_made_is_known_too() -> None:
    policy = make_policy(prefix_reuse=True)
    policy.add(make("a", 3, new=6))
    while not policy.is_idle:
        turn(policy)
    policy.add(Request(request_id="b", prompt=(0, 1, 2, 7, 7, 7, 7, 7, 9), sampling=SamplingParams()))
    assert shape(turn(policy)[0]) == [("b", 8, 1, True)]


def test_another_beginning_is_computed() -> None:
    policy = make_policy(prefix_reuse=True)
    policy.add(make("a", 9))
    turn(policy)
    policy.add(Request(request_id="b", prompt=(9, *range(1, 9)), sampling=SamplingParams()))
    policy.add(Request(request_id="c", prompt=(0, 1, 2, 3, 9, 5, 6, 7, 8), sampling=SamplingParams()))
    assert shape(turn(policy)[0]) == [("a", 9, 1, True), ("b", 0, 9, True), ("c", 4, 5, True)]


def test_known_beginnings_make_room_when_blocks_run_out() -> None:
    policy = make_policy(prefix_reuse=True, num_blocks=4)
    policy.add(make("a", 8, new=1))
    turn(policy)
    policy.add(Request(request_id="b", prompt=tuple(range(20, 35)), sampling=SamplingParams(max_new_tokens=1)))
    batch, _ = turn(policy)
    assert shape(batch) == [("b", 0, 15, True)]
    policy.add(make("c", 8, new=1))
    assert shape(turn(policy)[0]) == [("c", 0, 8, True)]


def test_forgotten_beginnings_are_computed_again() -> None:
    policy = make_policy(prefix_reuse=True)
    policy.add(make("a", 9, new=1))
    turn(policy)
    assert policy.forget_prefixes() == 2
    policy.add(make("b", 9))
    assert shape(turn(policy)[0]) == [("b", 0, 9, True)]
    assert policy.forget_prefixes() == 0
    policy.add(make("c", 9))
    assert shape(turn(policy)[0]) == [("b", 9, 1, True), ("c", 0, 9, True)]


def test_restarted_requests_are_computed_again_and_keep_what_they_made() -> None:
    policy = make_policy(prefix_reuse=True)
    for name in "ab":
        policy.add(make(name, 9))
    turn(policy)
    policy.schedule()
    with pytest.raises(ArgumentError, match="1 batches are under way; complete them before"):
        policy.restart()
    policy.complete([7, 7])
    policy.restart()
    assert (policy.num_waiting, policy.num_running, policy.num_free_blocks) == (2, 0, 100)
    batch, outputs = turn(policy)
    assert shape(batch) == [("a", 0, 11, True), ("b", 8, 3, True)]
    assert [output.finish_reason for output in outputs] == [None, None]


def test_priority_is_a_head_start() -> None:
    policy = make_policy(max_batch_requests=1)
    for name, priority in (("a", 0), ("b", 0), ("low", -1), ("high", 1)):
        policy.add(make(name, 3, new=1, priority=priority))
    for index in range(70):
        policy.add(make(f"r{index}", 3, new=1))
    served = []
    while not policy.is_idle:
        served += [chunk.request_id for chunk in turn(policy)[0].chunks]
    assert served[:3] == ["high", "a", "b"]
    assert served.index("low") == 1 + 2 + 62, "after those that came up to 64 arrivals later, before all others"


def test_a_prompt_leaves_a_token_for_each_that_decodes() -> None:
    policy = make_policy(max_batch_tokens=8)
    policy.add(make("long", 30))
    turn(policy)
    policy.add(make("short", 3))
    policy.abort("long")
    turn(policy)
    policy.add(make("first", 40, priority=1))
    shapes = [shape(turn(policy)[0]) for _ in range(2)]
    assert shapes == [[("short", 3, 1, True), ("first", 0, 7, False)], [("first", 7, 7, False), ("short", 4, 1, True)]]


def test_nobody_new_takes_the_blocks_that_one_who_runs_waits_for() -> None:
    policy = make_policy(num_blocks=5, num_slots=2, max_batch_tokens=8)
    policy.add(make("a", 4, new=8))
    policy.add(make("b", 16, new=4))
    assert [shape(policy.schedule()) for _ in range(2)] == [[("a", 0, 4, True)], [("b", 0, 8, False)]]
    policy.complete([1])
    assert shape(policy.schedule()) == [("a", 4, 1, True)]
    policy.add(make("c", 4, new=4))
    policy.complete([])
    assert policy.num_free_blocks == 1
    assert policy.schedule().chunks == (), "b wants two blocks"


def test_limits_are_checked() -> None:
    with pytest.raises(ArgumentError, match="page_size=0 must be at least 1"):
        PolicyLimits(num_blocks=1, page_size=0)
    with pytest.raises(ArgumentError, match="max_batch_tokens=4 is less than max_batch_requests=8"):
        PolicyLimits(num_blocks=1, max_batch_tokens=4, max_batch_requests=8)


def test_ends_are_final() -> None:
    assert {state for state, after in TRANSITIONS.items() if not after} == {RequestState.FINISHED, RequestState.ABORTED}
    assert set(TRANSITIONS) == set(RequestState)
