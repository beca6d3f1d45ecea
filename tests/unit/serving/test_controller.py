"""The controller with leaders played by the test."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue

import msgspec
import pytest

from parallel_runtime.errors import ArgumentError, ContextStateError, PeerLostError, QueueFullError, RequestError
from parallel_runtime.serving.balancer import BalancePolicy
from parallel_runtime.serving.controller import DataParallelController
from parallel_runtime.serving.controls import Answer, Control, Status
from parallel_runtime.serving.deliveries import Delivery
from parallel_runtime.serving.messages import (
    Abort,
    FinishReason,
    FrontMessage,
    LeaderMessage,
    Ready,
    Rejected,
    Request,
    Shutdown,
    StepOutput,
    Submit,
    Wake,
    decode_front,
    encode,
)
from parallel_runtime.serving.sampling_params import SamplingParams

STATUS = Status(num_waiting=0, num_running=0, num_free_blocks=1, num_cached_blocks=0, num_reused_tokens=0, weights_version=0)


def make(name: str, length: int = 1, new: int = 1) -> Request:
    return Request(request_id=name, prompt=(1,) * length, sampling=SamplingParams(max_new_tokens=new))


def end(name: str, *tokens: int, reason: FinishReason = FinishReason.LENGTH) -> StepOutput:
    return StepOutput(request_id=name, token_ids=tokens, finish_reason=reason)


@dataclass
class Stage:
    """A controller, and the far ends of its links."""

    controller: DataParallelController
    leaders: list[Connection]
    sink: "SimpleQueue[Delivery]" = field(default_factory=SimpleQueue)

    def heard(self, dp_rank: int) -> list[FrontMessage]:
        heard: list[FrontMessage] = []
        while self.leaders[dp_rank].poll():
            heard.append(decode_front(self.leaders[dp_rank].recv_bytes()))
        return heard

    def say(self, dp_rank: int, *messages: LeaderMessage) -> None:
        for message in messages:
            self.leaders[dp_rank].send_bytes(encode(message))
        self.controller.pump(1.0)

    def delivered(self) -> list[Delivery]:
        return [self.sink.get_nowait() for _ in range(self.sink.qsize())]


@pytest.fixture
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        pairs = [Pipe() for _ in range(2)]
        for front, leader in pairs:
            stack.enter_context(front)
            stack.enter_context(leader)
        controller = DataParallelController([front for front, _ in pairs], max_requests=3)
        yield Stage(controller=controller, leaders=[leader for _, leader in pairs])


def test_requests_are_spread_and_their_tokens_delivered(stage: Stage) -> None:
    assert [stage.controller.submit(make(name), stage.sink) for name in "abc"] == [0, 1, 0]
    assert stage.heard(0) == [Submit(make("a")), Submit(make("c"))]
    assert stage.heard(1) == [Submit(make("b"))]
    more = StepOutput(request_id="a", token_ids=(5,))
    stage.say(0, more, end("a", 6), more)  # what comes after the end belongs to nobody
    assert stage.delivered() == [("a", more), ("a", end("a", 6))]
    assert stage.controller.requests_per_rank == (1, 1)


def test_refusals_come_as_errors(stage: Stage) -> None:
    stage.controller.submit(make("a"), stage.sink)
    stage.controller.submit(make("b"), stage.sink)
    stage.say(0, Rejected(request_id="a", message="too long"))
    stage.say(1, Rejected(request_id="b", message="full", queue_full=True))
    (_, first), (_, second) = stage.delivered()
    assert (type(first), str(first)) == (RequestError, "too long")
    assert (type(second), str(second)) == (QueueFullError, "full")
    assert stage.controller.requests_per_rank == (0, 0)


def test_the_limit_and_double_names_are_refused_at_once(stage: Stage) -> None:
    for name in "abc":
        stage.controller.submit(make(name), stage.sink)
    with pytest.raises(RequestError, match="'a' is alive already"):
        stage.controller.submit(make("a"), stage.sink)
    with pytest.raises(QueueFullError, match="'d' refused: 3 requests are under way and the limit is 3"):
        stage.controller.submit(make("d"), stage.sink)
    with pytest.raises(ArgumentError, match="max_requests=0"):
        DataParallelController(max_requests=0)
    with pytest.raises(ArgumentError, match="dp=0"):
        DataParallelController([])


def test_abort_goes_where_the_request_is(stage: Stage) -> None:
    for name in "abc":
        stage.controller.submit(make(name), stage.sink)
    stage.heard(0), stage.heard(1)
    stage.controller.abort("b")
    stage.controller.abort("unknown")
    assert (stage.heard(0), stage.heard(1)) == ([], [Abort("b")])
    stage.say(1, end("b", reason=FinishReason.ABORT))
    stage.controller.abort("b")
    stage.controller.abort()
    assert (stage.heard(0), stage.heard(1)) == ([Abort("a"), Abort("c")], [])


def test_an_abort_never_overtakes_its_request() -> None:
    """Another thread aborts the request while it is being sent."""
    front, leader = Pipe()
    with front, leader:
        controller = DataParallelController([front])

        class AbortingLink:
            def fileno(self) -> int:
                return front.fileno()

            def send_bytes(self, payload: bytes) -> None:
                if isinstance(message := decode_front(payload), Submit):
                    controller.abort(message.request.request_id)
                front.send_bytes(payload)

        controller.connect(0, [AbortingLink()])  # type: ignore[list-item]  # as much of a link as is needed
        controller.submit(make("a"), SimpleQueue())
        assert [decode_front(leader.recv_bytes()) for _ in range(2)] == [Submit(make("a")), Abort("a")]


def test_a_leader_that_does_not_read_holds_up_nobody() -> None:
    """More than the pipe takes: the caller goes on, and all of it arrives in order once somebody reads."""
    front, leader = Pipe()
    with front, leader:
        controller = DataParallelController([front], max_requests=1000)
        names = [f"r{number}" for number in range(200)]
        for name in names:
            controller.submit(make(name, length=2000), SimpleQueue())
        heard: list[str] = []
        while len(heard) < len(names):
            assert leader.poll(5.0)
            message = decode_front(leader.recv_bytes())
            assert isinstance(message, Submit)
            heard.append(message.request.request_id)
            controller.pump(0.0)
        assert heard == names


def test_shutdown_reaches_every_leader_that_is_there(stage: Stage) -> None:
    stage.leaders[0].close()
    stage.controller.shutdown()
    assert stage.heard(1) == [Shutdown()]


def test_ready_when_all_are(stage: Stage) -> None:
    ready = [Ready(dp_rank=rank, num_blocks=1, page_size=1, max_request_tokens=9, vocab_size=9) for rank in range(2)]
    stage.say(1, ready[1])
    assert stage.controller.wait_ready(0.0) == (ready[1],)
    assert not stage.controller.is_ready
    stage.say(0, ready[0])
    assert stage.controller.wait_ready() == tuple(ready)


def test_a_failure_ends_all_and_stays(stage: Stage) -> None:
    error = PeerLostError("rank 1 is gone")
    stage.controller.submit(make("a"), stage.sink)
    stage.controller.fail(error)
    stage.controller.fail(PeerLostError("a consequence"))
    assert stage.delivered() == [("a", error)]
    for call in (stage.controller.wait_ready, lambda: stage.controller.submit(make("b"), stage.sink)):
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            call()


def test_a_leader_that_hangs_up_is_noticed(stage: Stage) -> None:
    stage.leaders[0].close()
    stage.controller.pump(1.0)
    assert stage.controller.num_open_links() == 1


def test_tokens_balance_where_that_is_asked_for() -> None:
    pairs = [Pipe() for _ in range(2)]
    controller = DataParallelController([front for front, _ in pairs], policy=BalancePolicy.LEAST_TOKENS)
    sink: SimpleQueue[Delivery] = SimpleQueue()
    assert [controller.submit(make(str(n), length, 1), sink) for n, length in enumerate((100, 1, 1, 1))] == [0, 1, 1, 1]
    for front, leader in pairs:
        front.close()
        leader.close()


def test_in_lockstep_every_leader_hears_of_every_request() -> None:
    with ExitStack() as stack:
        pairs = [Pipe() for _ in range(3)]
        for front, leader in pairs:
            stack.enter_context(front)
            stack.enter_context(leader)
        controller = DataParallelController([front for front, _ in pairs], policy=BalancePolicy.ROUND_ROBIN, lockstep=True)
        stage = Stage(controller, [leader for _, leader in pairs])
        for name in ("a", "b"):
            controller.submit(make(name), stage.sink)
        assert stage.heard(0) == [Submit(make("a")), Wake()]
        assert stage.heard(1) == [Wake(), Submit(make("b"))]
        assert stage.heard(2) == [Wake(), Wake()]


READY = Ready(dp_rank=0, num_blocks=1, page_size=1, max_request_tokens=9, vocab_size=9)


@pytest.fixture
def pair() -> Iterator[Stage]:
    """Two replicas of one rank each, the second of which does not serve yet."""
    with ExitStack() as stack:
        controller = DataParallelController(replicas=2, max_requests=9, seed=3)
        leaders = []
        for replica in range(2):
            front, leader = Pipe()
            stack.enter_context(front)
            leaders.append(stack.enter_context(leader))
            controller.connect(replica, [front])
        stage = Stage(controller, leaders)
        stage.say(0, READY)
        yield stage


def serve(stage: Stage, replica: int, *messages: LeaderMessage) -> None:
    for message in messages:
        stage.leaders[replica].send_bytes(encode(message))
    stage.controller.pump(1.0, replica=replica)


def test_a_replica_gets_requests_once_it_serves(pair: Stage) -> None:
    assert [pair.controller.submit(make(name), pair.sink) for name in "ab"] == [0, 0]
    assert not pair.controller.is_ready
    serve(pair, 1, READY)
    assert pair.controller.wait_ready() == (READY, READY)
    assert pair.controller.submit(make("c"), pair.sink) == 1


def test_what_a_lost_replica_held_goes_on_elsewhere(pair: Stage) -> None:
    serve(pair, 1, READY)
    for name in "ab":
        pair.controller.submit(make(name, new=4), pair.sink)
    assert pair.heard(1) == [Submit(make("b", new=4))]
    serve(pair, 1, StepOutput(request_id="b", token_ids=(5,)))
    pair.heard(0)
    pair.controller.lose(1, PeerLostError("gone"))
    assert pair.heard(0) == [Submit(msgspec.structs.replace(make("b", new=4), made=(5,)))]
    assert pair.controller.pump(0.0, replica=1) == frozenset()
    serve(pair, 0, StepOutput(request_id="b", token_ids=(6,)), end("b", 7, 8))
    assert [what.token_ids for name, what in pair.delivered() if isinstance(what, StepOutput)] == [(5,), (6,), (7, 8)]


def test_nobody_is_told_of_a_replica_before_it_gets_requests(pair: Stage) -> None:
    """Its leaders serve, but something is asked of the others, so it has not joined."""
    asker = threading.Thread(target=pair.controller.controls.pause)
    asker.start()
    while not (heard := pair.heard(0)):
        pass
    serve(pair, 1, READY)
    assert (pair.controller.serves(1), pair.controller.is_ready) == (True, False)
    (question,) = heard
    assert isinstance(question, Control)
    serve(pair, 0, Answer(number=question.number, status=STATUS))
    asker.join()
    assert [pair.controller.is_ready] == [False], "it is paused first, as the others are"
    (question,) = pair.heard(1)
    assert isinstance(question, Control)
    serve(pair, 1, Answer(number=question.number, status=STATUS))
    assert pair.controller.is_ready
    assert pair.controller.submit(make("a"), pair.sink, to=1) == 1


def test_one_that_is_lost_meanwhile_gets_no_requests(pair: Stage) -> None:
    pair.controller.lose(0, PeerLostError("gone"))
    pair.controller.admit(0)
    assert pair.controller.submit(make("a"), pair.sink) is None


def test_requests_wait_while_no_replica_serves(pair: Stage) -> None:
    pair.controller.lose(0, PeerLostError("gone"))
    assert pair.controller.submit(make("a"), pair.sink) is None
    assert pair.controller.num_held == 1
    serve(pair, 1, READY)
    assert (pair.controller.num_held, pair.heard(1)) == (0, [Submit(make("a"))])


def test_a_drained_replica_ends_what_it_has_and_gets_nothing_new(pair: Stage) -> None:
    serve(pair, 1, READY)
    pair.controller.submit(make("a"), pair.sink)
    assert not pair.controller.drain(0, timeout_s=0.0)
    assert [pair.controller.submit(make(name), pair.sink) for name in "bc"] == [1, 1]
    with pytest.raises(RequestError, match="'d' is for worker 0, but replica 0 takes no more requests"):
        pair.controller.submit(make("d"), pair.sink, to=0)
    serve(pair, 0, end("a", 5))
    assert pair.controller.drain(0)
    pair.controller.resume(0)
    assert pair.controller.submit(make("d"), pair.sink) == 0
    pair.controller.lose(0, PeerLostError("gone"))
    with pytest.raises(ContextStateError, match="replica 0 does not serve"):
        pair.controller.resume(0)


def test_a_request_may_be_for_one_rank(pair: Stage) -> None:
    with pytest.raises(RequestError, match="'a' is for worker 1, but replica 1 does not serve"):
        pair.controller.submit(make("a"), pair.sink, to=1)
    with pytest.raises(RequestError, match="'a' is for worker 2; there are 2, 0 to 1"):
        pair.controller.submit(make("a"), pair.sink, to=2)
    serve(pair, 1, READY)
    assert [pair.controller.submit(make(name), pair.sink, to=1) for name in "abc"] == [1, 1, 1]


def test_a_full_rank_leaves_the_rest_waiting() -> None:
    front, leader = Pipe()
    with front, leader:
        controller = DataParallelController([front], max_per_rank=1)
        stage = Stage(controller, [leader])
        assert [controller.submit(make(name), stage.sink) for name in "ab"] == [0, None]
        assert stage.heard(0) == [Submit(make("a"))]
        stage.say(0, end("a", 1))
        assert stage.heard(0) == [Submit(make("b"))]
        controller.submit(make("c"), stage.sink)
        stage.delivered()
        controller.abort("c")
        assert stage.delivered() == [("c", end("c", reason=FinishReason.ABORT))]


def test_every_replica_draws_the_same_tokens_for_a_request(pair: Stage) -> None:
    drawing = Request(request_id="a", prompt=(1,), sampling=SamplingParams(temperature=1.0))
    pair.controller.submit(drawing, pair.sink)
    (first,) = pair.heard(0)
    serve(pair, 1, READY)
    pair.controller.lose(0, PeerLostError("gone"))
    assert pair.heard(1) == [first]
    assert isinstance(first, Submit)
    assert first.request.sampling.seed is not None
