"""Which of the requests that wait at the front goes first."""

from parallel_runtime.serving.dispatch import Dispatcher, Send
from parallel_runtime.serving.messages import Request, Submit
from parallel_runtime.serving.sampling_params import SamplingParams


def test_priority_is_a_head_start_among_those_that_wait() -> None:
    dispatcher = Dispatcher(1)
    for name, priority in (("a", 0), ("low", -1), ("b", 0), ("high", 1)):
        request = Request(request_id=name, prompt=(1,), sampling=SamplingParams(), priority=priority)
        assert dispatcher.submit(request) == []
    sent = [action.message for action in dispatcher.open(0) if isinstance(action, Send)]
    assert [message.request.request_id for message in sent if isinstance(message, Submit)] == ["high", "a", "b", "low"]
