"""The engine's one thread, with ranks and leaders played by the test."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import pytest

from parallel_runtime.errors import ContextStateError, ParallelRuntimeError, PeerLostError, RankFailedError
from parallel_runtime.serving.attendant import Attendant
from parallel_runtime.serving.controller import DataParallelController, Delivery
from parallel_runtime.serving.messages import Request, StepOutput, encode
from parallel_runtime.serving.sampling_params import SamplingParams

pytestmark = pytest.mark.timeout(20)


class FakeRanks:
    """Ranks that end as they are told."""

    def __init__(self) -> None:
        self.outcome: bool | BaseException = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def check(self) -> bool:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def wait(self, timeout_s: float | None = None) -> None: ...


@dataclass
class Desk:
    controller: DataParallelController
    leader: Connection
    ranks: FakeRanks
    stack: ExitStack
    sink: "SimpleQueue[Delivery]"

    def delivered(self) -> StepOutput | ParallelRuntimeError:
        return self.sink.get(timeout=10)[1]


@pytest.fixture
def desk() -> Iterator[Desk]:
    front, leader = Pipe()
    with front, leader, ExitStack() as stack:
        controller, ranks = DataParallelController([front]), FakeRanks()
        Attendant(controller, ranks, exit_s=5.0, verdict_s=0.2).start(stack)
        sink: SimpleQueue[Delivery] = SimpleQueue()
        controller.submit(Request(request_id="a", prompt=(1,), sampling=SamplingParams()), sink)
        yield Desk(controller=controller, leader=leader, ranks=ranks, stack=stack, sink=sink)


def test_it_hands_out_what_leaders_say(desk: Desk) -> None:
    output = StepOutput(request_id="a", token_ids=(4,))
    desk.leader.send_bytes(encode(output))
    assert desk.delivered() == output


def test_a_failed_rank_ends_what_waits(desk: Desk) -> None:
    desk.ranks.outcome = RankFailedError("rank 3 was killed", rank=3)
    assert desk.delivered() is desk.ranks.outcome


def test_any_other_failure_is_told_too(desk: Desk) -> None:
    desk.ranks.outcome = ZeroDivisionError("boom")
    with pytest.raises(PeerLostError, match="serving ended by ZeroDivisionError: boom"):
        raise desk.delivered()  # type: ignore[misc]  # an error is what is expected


def test_a_leader_that_hangs_up_without_a_verdict(desk: Desk) -> None:
    desk.leader.close()
    assert "hung up without a word" in str(desk.delivered())


def test_ranks_that_all_return_by_themselves(desk: Desk) -> None:
    desk.leader.close()
    desk.ranks.outcome = True
    assert str(desk.delivered()) in (
        "every rank has ended its loop, though the engine is open",
        "the leader of a replica hung up without a word, though no rank is known to have failed",
    )


def test_closing_ends_what_is_left(desk: Desk) -> None:
    desk.stack.close()
    assert isinstance(desk.delivered(), ContextStateError)
    with pytest.raises(ContextStateError, match="the engine was closed"):
        desk.controller.wait_ready()
