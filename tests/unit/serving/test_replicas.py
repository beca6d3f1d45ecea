"""Replicas that start, serve, hang, fail and end, with worlds played by the test."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import pytest

from parallel_runtime.errors import (
    ContextStateError,
    LaunchError,
    ParallelRuntimeError,
    PeerTimeoutError,
    RankFailedError,
)
from parallel_runtime.serving.controller import DataParallelController
from parallel_runtime.serving.controls import Answer, Control, LoadWeights, Status, SwapWeights
from parallel_runtime.serving.deliveries import Delivery
from parallel_runtime.serving.executors import RankExecutor
from parallel_runtime.serving.messages import (
    FinishReason,
    Ping,
    Pong,
    Ready,
    Request,
    Shutdown,
    StepOutput,
    Submit,
    decode_front,
    encode,
)
from parallel_runtime.serving.replicas import Replicas
from parallel_runtime.serving.sampling_params import SamplingParams
from parallel_runtime.serving.supervision import ReplicaState, Supervision

pytestmark = pytest.mark.timeout(30)

STATUS = Status(num_waiting=0, num_running=0, num_free_blocks=1, num_cached_blocks=0, num_reused_tokens=0, weights_version=0)
READY = Ready(dp_rank=0, num_blocks=1, page_size=1, max_request_tokens=9, vocab_size=9)
LIMIT_S = 10.0


@dataclass
class World:
    """One start of a replica: its ranks, and its leader's end of the link. It fails, and ends, as it is told."""

    leader: Connection
    outcome: bool | BaseException = False
    is_ended: threading.Event = field(default_factory=threading.Event)
    at_end: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.is_ended.set()
        self.at_end()

    def check(self) -> bool:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def wait(self, timeout_s: float | None = None) -> None: ...

    def serve(self) -> None:
        self.leader.send_bytes(encode(READY))

    def say(self, name: str, *tokens: int, reason: FinishReason | None = None) -> None:
        self.leader.send_bytes(encode(StepOutput(request_id=name, token_ids=tokens, finish_reason=reason)))

    def answer(self) -> None:
        """Do what was asked, if anything was."""
        if self.leader.poll(0.01) and isinstance(message := decode_front(self.leader.recv_bytes()), Control):
            self.leader.send_bytes(encode(Answer(number=message.number, status=STATUS)))

    def told(self) -> Control:
        while True:
            assert self.leader.poll(LIMIT_S), "nothing came"
            if isinstance(message := decode_front(self.leader.recv_bytes()), Control):
                return message

    def hear(self) -> Request:
        while True:
            assert self.leader.poll(LIMIT_S), "nothing came"
            if isinstance(message := decode_front(self.leader.recv_bytes()), Submit):
                return message.request


class Stage:
    """Two replicas, one rank each, behind a controller."""

    def __init__(self, count: int = 2, **rules: float | int) -> None:
        self.worlds: SimpleQueue[World] = SimpleQueue()
        self.refusals: list[ParallelRuntimeError] = []
        self.starts: list[float] = []
        self.sink: SimpleQueue[Delivery] = SimpleQueue()
        self.stack = ExitStack()
        self.controller = DataParallelController(replicas=count, max_requests=9)
        settings = Supervision(**{"backoff_s": 0.01, "max_restarts": 2, **rules})  # type: ignore[arg-type]  # as given
        self.replicas = Replicas(self.controller, self.open, count=count, rules=settings, exit_s=0.1, verdict_s=0.2)

    def open(self, stack: ExitStack) -> tuple[RankExecutor, Sequence[Connection]]:
        self.starts.append(time.monotonic())
        if self.refusals:
            raise self.refusals.pop()
        front, leader = Pipe()
        stack.callback(front.close)
        stack.callback(leader.close)
        world = World(leader)
        self.worlds.put(world)
        return stack.enter_context(world), [front]

    def start(self) -> list[World]:
        self.replicas.start(self.stack)
        worlds = [self.worlds.get(timeout=LIMIT_S) for _ in self.replicas.states]
        for world in worlds:
            world.serve()
        self.controller.wait_ready(LIMIT_S)
        return worlds

    def submit(self, name: str, new: int = 5) -> None:
        self.controller.submit(Request(request_id=name, prompt=(1,), sampling=SamplingParams(max_new_tokens=new)), self.sink)

    def delivered(self) -> StepOutput | ParallelRuntimeError:
        return self.sink.get(timeout=LIMIT_S)[1]

    def next_world(self) -> World:
        return self.worlds.get(timeout=LIMIT_S)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    with stage.stack:
        yield stage


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline, "it does not come"
        threading.Event().wait(0.01)


KILLED = RankFailedError("rank 0 was killed", rank=0, exitcode=-9)
RAISED = RankFailedError("rank 0 raised", rank=0)


def test_they_serve_and_end_when_told(stage: Stage) -> None:
    worlds = stage.start()
    assert stage.replicas.states == (ReplicaState.SERVING,) * 2
    stage.submit("a")
    worlds[0].say("a", 4, reason=FinishReason.STOP)
    assert stage.delivered() == StepOutput(request_id="a", token_ids=(4,), finish_reason=FinishReason.STOP)

    def leave(world: World) -> None:
        while not isinstance(decode_front(world.leader.recv_bytes()), Shutdown):
            pass
        world.leader.close()
        world.outcome = True

    threads = [threading.Thread(target=leave, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    stage.stack.close()
    for thread in threads:
        thread.join()
    assert all(world.is_ended.is_set() for world in worlds)
    with pytest.raises(ContextStateError, match="the engine was closed"):
        stage.controller.wait_ready()


@pytest.mark.parametrize("failure", [KILLED, RAISED, ZeroDivisionError("boom")])
def test_what_a_failed_replica_held_goes_on_and_it_comes_back(stage: Stage, failure: Exception) -> None:
    first, second = stage.start()
    stage.submit("a")
    assert first.hear().made == ()
    first.say("a", 4)
    assert stage.delivered() == StepOutput(request_id="a", token_ids=(4,))
    first.outcome = failure
    assert second.hear().made == (4,)
    second.say("a", 5, reason=FinishReason.STOP)
    assert stage.delivered() == StepOutput(request_id="a", token_ids=(5,), finish_reason=FinishReason.STOP)
    again = stage.next_world()
    assert first.is_ended.wait(LIMIT_S)
    again.serve()
    stage.controller.wait_ready(LIMIT_S)
    assert stage.controller.is_ready
    for name in "bc":
        stage.submit(name)
    assert {again.hear().request_id, second.hear().request_id} == {"b", "c"}


def test_a_leader_that_does_not_answer_is_lost() -> None:
    stage = Stage(health_s=0.2)
    with stage.stack:
        hung, well = stage.start()
        stage.submit("a")
        is_over = threading.Event()

        def answer() -> None:
            while not is_over.is_set():
                if well.leader.poll(0.01) and isinstance(decode_front(well.leader.recv_bytes()), Ping):
                    well.leader.send_bytes(encode(Pong()))

        thread = threading.Thread(target=answer)
        thread.start()
        stage.next_world().serve()
        assert hung.is_ended.wait(LIMIT_S)
        assert not well.is_ended.is_set()
        is_over.set()
        thread.join()


def test_a_leader_that_does_what_it_was_asked_is_not_lost_for_its_silence() -> None:
    """It loads weights for longer than a leader may be silent."""
    stage = Stage(1, health_s=0.2)
    with stage.stack:
        (slow,) = stage.start()
        asker = threading.Thread(target=stage.controller.controls.pause)
        asker.start()
        while not isinstance(message := decode_front(slow.leader.recv_bytes()), Control):
            pass
        assert not slow.is_ended.wait(0.6)
        slow.leader.send_bytes(encode(Answer(number=message.number, status=STATUS)))
        asker.join(LIMIT_S)
        assert not asker.is_alive()
        assert slow.is_ended.wait(LIMIT_S), "silent again, and asked for nothing"


def test_one_that_lacks_the_weights_of_a_trainer_gets_no_requests(stage: Stage) -> None:
    first, second = stage.start()
    asker = threading.Thread(target=stage.controller.controls.receive_weights, args=("host", 1))
    asker.start()
    for _ in range(2):
        for world in (first, second):
            while not isinstance(message := decode_front(world.leader.recv_bytes()), Control):
                pass
            world.leader.send_bytes(encode(Answer(number=message.number, status=STATUS)))
    asker.join(LIMIT_S)
    first.outcome = KILLED
    stage.next_world().serve()
    wait_until(lambda: stage.replicas.states == (ReplicaState.SERVING,) * 2)
    for name in "ab":
        stage.submit(name)
    assert [second.hear().request_id, second.hear().request_id] == ["a", "b"]
    with pytest.raises(ContextStateError, match="replica 0 lacks weights version 1; update all weights first"):
        stage.replicas.resume(0)


def test_one_that_comes_back_serves_once_it_has_the_weights_of_the_others(stage: Stage) -> None:
    """Not before: neither do requests go there, nor is it said to serve, nor is its health told."""
    controls = stage.controller.controls

    def asked(question: Callable[[], object], *answering: World) -> None:
        asker = threading.Thread(target=question)
        asker.start()
        while asker.is_alive():
            for world in answering:
                world.answer()
        asker.join()

    def update() -> None:
        assert controls.update_weights("new") == 1

    def tell_health() -> None:
        assert len(controls.health()) == 1

    first, second = stage.start()
    asked(update, first, second)
    first.outcome = KILLED
    again = stage.next_world()
    again.serve()
    load, swap = again.told(), again.told()
    assert (load.action, swap.action) == (LoadWeights("new"), SwapWeights(1))
    again.leader.send_bytes(encode(Answer(number=load.number, status=STATUS)))
    asked(tell_health, second)
    assert stage.replicas.states == (ReplicaState.STARTING, ReplicaState.SERVING)
    with pytest.raises(ContextStateError, match="replica 0 does not serve; it gets requests by itself once it has started"):
        stage.replicas.resume(0)
    for name in "ab":
        stage.submit(name)
    assert [second.hear().request_id, second.hear().request_id] == ["a", "b"]
    again.leader.send_bytes(encode(Answer(number=swap.number, status=STATUS)))
    wait_until(lambda: stage.replicas.states == (ReplicaState.SERVING,) * 2)
    stage.submit("c")
    assert again.hear().request_id == "c"


def test_a_leader_that_hangs_up_without_a_verdict_is_lost(stage: Stage) -> None:
    first, _ = stage.start()
    first.leader.close()
    stage.next_world()
    assert first.is_ended.is_set()


def test_ranks_that_return_though_nobody_said_so() -> None:
    stage = Stage(1, max_restarts=0)
    with stage.stack:
        (only,) = stage.start()
        stage.submit("a")
        only.leader.close()
        only.outcome = True
        assert "every rank has ended its loop" in str(stage.delivered()) or "hung up without a word" in str(stage.delivered())


def test_a_replica_that_never_serves_is_tried_again() -> None:
    stage = Stage(start_s=0.1)
    with stage.stack:
        stage.replicas.start(stage.stack)
        with pytest.raises(PeerTimeoutError, match=r"replica [01]: it does not serve 0\.1 s after its start"):
            stage.controller.wait_ready(LIMIT_S)
        assert len(stage.starts) >= 4


def test_one_that_raises_before_it_ever_served_is_not_tried_again(stage: Stage) -> None:
    stage.replicas.start(stage.stack)
    stage.next_world().outcome = RAISED
    with pytest.raises(RankFailedError, match="rank 0 raised"):
        stage.controller.wait_ready(LIMIT_S)
    assert len(stage.starts) == 2


def test_when_none_is_left_everybody_hears_so(stage: Stage) -> None:
    worlds = stage.start()
    stage.submit("a")
    stage.refusals = [LaunchError("no more processes")] * 9
    for world in worlds:
        world.outcome = KILLED
    error = stage.delivered()
    assert isinstance(error, LaunchError)
    assert str(error) == "none of the 2 replicas is left; the last was lost by: no more processes"
    assert stage.replicas.states == (ReplicaState.LOST,) * 2
    with pytest.raises(LaunchError, match="none of the 2 replicas is left"):
        stage.submit("b")
    assert len(stage.starts) == 6, "two starts, and two restarts of each"


def test_a_single_replica_fails_with_its_own_error() -> None:
    stage = Stage(1, max_restarts=0)
    with stage.stack:
        (only,) = stage.start()
        stage.submit("a")
        only.outcome = KILLED
        assert stage.delivered() is KILLED


def test_requests_wait_for_a_single_replica_that_is_started_again() -> None:
    stage = Stage(1)
    with stage.stack:
        (only,) = stage.start()
        stage.submit("a")
        only.say("a", 4)
        only.outcome = KILLED
        again = stage.next_world()
        stage.submit("b")
        again.serve()
        assert [again.hear().made, again.hear().made] == [(4,), ()]


def test_a_restart_on_request_is_no_failure() -> None:
    stage = Stage(2, max_restarts=0)
    with stage.stack:
        first, second = stage.start()
        assert stage.controller.drain(0, LIMIT_S)
        stage.replicas.restart(0)
        again = stage.next_world()
        assert first.is_ended.is_set()
        again.serve()
        stage.controller.wait_ready(LIMIT_S)
        for name in "ab":
            stage.submit(name)
        assert {again.hear().request_id, second.hear().request_id} == {"a", "b"}


def test_closing_does_not_wait_for_a_pause() -> None:
    stage = Stage(backoff_s=1000.0, longest_backoff_s=1000.0)
    with stage.stack:
        first, _ = stage.start()
        first.outcome = KILLED
        assert first.is_ended.wait(LIMIT_S)
    assert not any(thread.name.startswith("engine-replica") for thread in threading.enumerate())


def test_an_executor_that_cannot_end_its_ranks_is_told_of(stage: Stage) -> None:
    first, _ = stage.start()

    def refuse() -> None:
        raise LaunchError("these still run")

    first.at_end = refuse
    with pytest.raises(LaunchError, match="these still run"):
        stage.stack.close()
