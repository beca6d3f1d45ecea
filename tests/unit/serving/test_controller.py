"""The controller with leaders played by the test."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue

import pytest

from parallel_runtime.errors import ArgumentError, PeerLostError, QueueFullError, RequestError
from parallel_runtime.serving.balancer import BalancePolicy
from parallel_runtime.serving.controller import DataParallelController, Delivery
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
        DataParallelController([], max_requests=0)


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


class AbortingLink:
    """A link over which a request is being sent while another thread aborts it."""

    def __init__(self) -> None:
        self.controller: DataParallelController | None = None
        self.sent: list[FrontMessage] = []

    def send_bytes(self, payload: bytes) -> None:
        message = decode_front(payload)
        if isinstance(message, Submit):
            assert self.controller is not None
            self.controller.abort(message.request.request_id)
        self.sent.append(message)


def test_an_abort_never_overtakes_its_request() -> None:
    link = AbortingLink()
    link.controller = DataParallelController([link])  # type: ignore[list-item]  # as much of a link as is needed
    link.controller.submit(make("a"), SimpleQueue())
    assert link.sent == [Submit(make("a")), Abort("a")]


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
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        stage.controller.gather([make("c")])
    assert stage.controller.gather([]) == []


def test_a_leader_that_hangs_up_is_noticed(stage: Stage) -> None:
    stage.leaders[0].close()
    stage.controller.pump(1.0)
    assert stage.controller.has_lost_links
    assert stage.controller.num_open_links == 1


def play(stage: Stage, is_over: threading.Event) -> None:
    """Leaders that answer each request with as many tokens as it asks for, the newest request first."""
    while not is_over.is_set():
        for dp_rank in range(2):
            requests = [message.request for message in stage.heard(dp_rank) if isinstance(message, Submit)]
            for request in reversed(requests):
                for token in range(request.sampling.max_new_tokens - 1):
                    stage.leaders[dp_rank].send_bytes(encode(StepOutput(request_id=request.request_id, token_ids=(token,))))
                stage.leaders[dp_rank].send_bytes(encode(end(request.request_id, len(request.prompt))))
        stage.controller.pump(0.01)


@pytest.fixture
def served(stage: Stage) -> Iterator[Stage]:
    is_over = threading.Event()
    thread = threading.Thread(target=play, args=(stage, is_over))
    thread.start()
    yield stage
    is_over.set()
    thread.join()


def test_gather_keeps_the_order_and_passes_the_limit(served: Stage) -> None:
    requests = [make(f"r{index}", length=index + 1, new=index % 3 + 1) for index in range(20)]
    results = served.controller.gather(requests)
    assert [result.request_id for result in results] == [request.request_id for request in requests]
    assert [len(result.token_ids) for result in results] == [request.sampling.max_new_tokens for request in requests]
    assert [result.token_ids[-1] for result in results] == list(range(1, 21))
    assert served.controller.requests_per_rank == (0, 0)


def test_a_stream_that_is_left_early_aborts(stage: Stage) -> None:
    stream = stage.controller.stream([make(name) for name in "abcde"])
    assert [stage.heard(rank) for rank in range(2)] == [[], []]

    def answer() -> None:
        stage.leaders[0].poll(5.0)
        stage.say(0, StepOutput(request_id="a", token_ids=(3,)))

    thread = threading.Thread(target=answer)
    thread.start()
    assert next(stream).token_ids == (3,)
    thread.join()
    stream.close()
    stream.close()
    aborted = {message.request_id for rank in range(2) for message in stage.heard(rank) if isinstance(message, Abort)}
    assert aborted == {"a", "b", "c"}
    with pytest.raises(StopIteration):
        next(stream)


def test_one_refused_request_ends_the_stream_and_aborts_the_rest(stage: Stage) -> None:
    def refuse() -> None:
        stage.leaders[0].poll(5.0)
        stage.say(0, Rejected(request_id="a", message="too long"))

    thread = threading.Thread(target=refuse)
    thread.start()
    with pytest.raises(RequestError, match="too long"):
        stage.controller.gather([make("a"), make("b")])
    thread.join()
    assert Abort("b") in stage.heard(1)


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
