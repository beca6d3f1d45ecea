"""One call of an engine: what is sent when, what its caller gets, and what is aborted when it ends early."""

from queue import SimpleQueue

import pytest

from parallel_runtime.errors import ParallelRuntimeError, PeerLostError, QueueFullError, RequestError
from parallel_runtime.serving.answers import AnswerReader
from parallel_runtime.serving.calls import Call, call_events
from parallel_runtime.serving.deliveries import Delivery, Sink
from parallel_runtime.serving.messages import FinishReason, Request, StepOutput
from parallel_runtime.serving.metrics import EngineMetrics
from parallel_runtime.serving.sampling_params import SamplingParams


def answer(name: str, index: int = 0, sample: int = 0, length: int = 1) -> AnswerReader:
    request = Request(request_id=name, prompt=(1,) * length, sampling=SamplingParams(max_new_tokens=9))
    return AnswerReader(request, index=index, sample=sample, stops=(), tokenizer=None)


class Submitter:
    """Takes two requests at once, and answers each with a token and the end as soon as it is told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int | None]] = []
        self.alive: dict[str, Sink] = {}
        self.aborted: list[str | None] = []
        self.refusal: ParallelRuntimeError | None = None

    def submit(self, request: Request, sink: Sink, *, to: int | None = None, places: dict[str, int] | None = None) -> int | None:
        if self.refusal is not None:
            raise self.refusal
        if len(self.alive) == 2:
            raise QueueFullError("full")
        self.sent.append((request.request_id, to))
        self.alive[request.request_id] = sink
        assert places is not None
        places[request.request_id] = 5
        return 5

    def abort(self, request_id: str | None = None) -> None:
        self.aborted.append(request_id)

    def end(self, name: str) -> None:
        self.alive.pop(name).put((name, StepOutput(request_id=name, token_ids=(3,), finish_reason=FinishReason.LENGTH)))


def open_call(
    submitter: Submitter, *answers: AnswerReader, share_from: int | None = None
) -> "tuple[Call, SimpleQueue[Delivery]]":
    sink: SimpleQueue[Delivery] = SimpleQueue()
    return Call(submitter, answers, sink, metrics=EngineMetrics(), share_from=share_from), sink


def test_as_many_are_under_way_as_there_is_room_for() -> None:
    submitter = Submitter()
    call, sink = open_call(submitter, *(answer(name, index) for index, name in enumerate("abc")))
    events = []
    while not call.is_over:
        call.submit()
        submitter.end(next(iter(submitter.alive)))
        events.append(call.take(sink.get()))
    assert [event.index for event in events if event is not None] == [0, 1, 2]
    assert [name for name, _ in submitter.sent] == ["a", "b", "c"]


def test_a_queue_that_others_keep_full_refuses_the_first() -> None:
    submitter = Submitter()
    submitter.refusal = QueueFullError("others")
    call, _ = open_call(submitter, answer("a"))
    with pytest.raises(QueueFullError, match="others"):
        call.submit()


def test_further_answers_follow_the_first_to_where_the_prompt_is_known() -> None:
    submitter = Submitter()
    call, sink = open_call(submitter, answer("a", length=8), answer("b", sample=1, length=8), share_from=8)
    call.submit()
    assert submitter.sent == [("a", None)]
    submitter.end("a")
    call.take(sink.get())
    call.submit()
    assert submitter.sent == [("a", None), ("b", 5)]


def test_one_that_is_left_early_aborts() -> None:
    submitter = Submitter()
    call, sink = open_call(submitter, *(answer(name, index) for index, name in enumerate("abc")))
    events = call_events(call, sink)
    sink.put(("a", StepOutput(request_id="a", token_ids=(3,))))
    assert next(events).token_ids == (3,)
    events.close()  # type: ignore[attr-defined]  # a generator
    assert submitter.aborted == ["a", "b"]
    assert call.is_over
    assert call.take(("a", StepOutput(request_id="a", token_ids=(4,)))) is None


@pytest.mark.parametrize("error", [RequestError("too long"), PeerLostError("given up")])
def test_an_error_of_one_ends_the_call_and_aborts_the_rest(error: ParallelRuntimeError) -> None:
    submitter = Submitter()
    call, sink = open_call(submitter, answer("a"), answer("b", 1))
    sink.put(("a", error))
    with pytest.raises(type(error), match=str(error)):
        next(call_events(call, sink))
    assert submitter.aborted == ["b"]
