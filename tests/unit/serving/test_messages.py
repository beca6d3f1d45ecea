"""Messages: checked values, and bytes that come back as they went."""

import pytest

from parallel_runtime.errors import RequestError, SerializationError
from parallel_runtime.serving.messages import (
    Abort,
    FinishReason,
    FrontMessage,
    LeaderMessage,
    Ready,
    Rejected,
    Request,
    SamplingParams,
    Shutdown,
    StepOutput,
    Submit,
    decode_front,
    decode_leader,
    encode,
)

REQUEST = Request(request_id="a", prompt=(1, 2), sampling=SamplingParams(temperature=0.5, seed=2**63 - 1, stop_token_ids=(0,)))


@pytest.mark.parametrize("message", [Submit(REQUEST), Abort("a"), Abort(), Shutdown()])
def test_front_messages_come_back(message: FrontMessage) -> None:
    assert decode_front(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Ready(dp_rank=1, num_blocks=3, page_size=16, max_request_tokens=9, vocab_size=7, ranks=("rank 0",)),
        StepOutput(request_id="a", token_ids=(5,), finish_reason=FinishReason.STOP),
        Rejected(request_id="a", message="why", queue_full=True),
    ],
)
def test_leader_messages_come_back(message: LeaderMessage) -> None:
    assert decode_leader(encode(message)) == message


def test_foreign_bytes_are_refused() -> None:
    for payload in (b"", b"\xff", b"\x80", encode(Shutdown())):
        with pytest.raises(SerializationError, match="are not the message expected here"):
            decode_leader(payload)
    with pytest.raises(SerializationError, match="are not the message expected here"):
        decode_front(encode(Rejected(request_id="a", message="why")))


def test_values_are_checked_on_arrival_too() -> None:
    payload = encode(Submit(REQUEST)).replace(b"top_p\xcb" + b"\x3f\xf0" + b"\x00" * 6, b"top_p\xcb" + b"\x40\xf0" + b"\x00" * 6)
    with pytest.raises(SerializationError, match="top_p"):
        decode_front(payload)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
        ({"max_new_tokens": True}, "max_new_tokens .* got True"),
        ({"temperature": -0.1}, "temperature=-0.1 must be a finite number"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k must be an integer of at least 1"),
        ({"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"seed": 2**63}, "seed"),
        ({"stop_token_ids": (-1,)}, "a stop token id"),
    ],
)
def test_sampling_values_outside_their_range(values: dict[str, object], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        SamplingParams(**values)  # type: ignore[arg-type]  # wrong on purpose


def test_requests_that_cannot_be() -> None:
    with pytest.raises(RequestError, match="'a' has an empty prompt"):
        Request(request_id="a", prompt=(), sampling=SamplingParams())
    with pytest.raises(RequestError, match="request_id that is not empty"):
        Request(request_id="", prompt=(1,), sampling=SamplingParams())
    with pytest.raises(RequestError, match="a prompt token of request 'a' must be an integer of at least 0, got -3"):
        Request(request_id="a", prompt=(1, -3), sampling=SamplingParams())


def test_what_a_request_holds_at_most() -> None:
    assert Request(request_id="a", prompt=(1, 2, 3), sampling=SamplingParams(max_new_tokens=4)).max_tokens == 7
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=0.1).is_greedy
