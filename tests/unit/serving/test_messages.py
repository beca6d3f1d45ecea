"""Messages: checked values, and bytes that come back as they went."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.errors import RequestError, SerializationError
from parallel_runtime.serving.messages import (
    Abort,
    FinishReason,
    FrontMessage,
    LeaderMessage,
    Ping,
    Pong,
    Ready,
    Rejected,
    Request,
    Shutdown,
    StepOutput,
    Submit,
    decode_front,
    decode_leader,
    encode,
)
from parallel_runtime.serving.sampling_params import SamplingParams

JUNK: st.SearchStrategy[object] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 3),
    st.integers(),
    st.sampled_from([2**63 - 1, 2**63, 10**400, "yes", b"ab", 1e308, 1e-320, float("inf"), float("nan")]),
    st.floats(),
    st.lists(st.integers(-1, 5), max_size=2),
    st.lists(st.integers(), max_size=2).map(tuple),
)

REQUEST = Request(request_id="a", prompt=(1, 2), sampling=SamplingParams(temperature=0.5, seed=2**63 - 1, stop_token_ids=(0,)))
CONTINUED = Request(request_id="a", prompt=(1, 2), sampling=SamplingParams(max_new_tokens=3), made=(4, 5))


@pytest.mark.parametrize("message", [Submit(REQUEST), Submit(CONTINUED), Abort("a"), Abort(), Shutdown(), Ping()])
def test_front_messages_come_back(message: FrontMessage) -> None:
    assert decode_front(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Ready(dp_rank=1, num_blocks=3, page_size=16, max_request_tokens=9, vocab_size=7, ranks=("rank 0",)),
        StepOutput(request_id="a", token_ids=(5,), finish_reason=FinishReason.STOP),
        Rejected(request_id="a", message="why", queue_full=True),
        Pong(),
    ],
)
def test_leader_messages_come_back(message: LeaderMessage) -> None:
    assert decode_leader(encode(message)) == message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_tokens", "did you mean 'max_new_tokens'"),
        ("stop_strings", "did you mean 'stop'"),
        ("temprature", "did you mean 'temperature'"),
        ("zz", "it has max_new_tokens, temperature, "),
    ],
)
def test_a_setting_of_another_name_is_told_ours(name: str, hint: str) -> None:
    values: dict[str, Any] = {name: 1}
    with pytest.raises(RequestError, match=f"SamplingParams has no setting '{name}'; {hint}"):
        SamplingParams(**values)
    with pytest.raises(RequestError, match=r"give them by name: SamplingParams\(max_new_tokens=\.\.\.\)"):
        SamplingParams(3)  # type: ignore[call-arg]  # what is tested


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
        ({"seed": 2**63}, r"seed must be below 2\*\*63, got 9223372036854775808"),
        ({"max_new_tokens": 10**5000}, "max_new_tokens must be below .* 16610 bits"),
        ({"seed": "1"}, "seed must be an integer of at least 0, got '1'"),
        ({"stop_token_ids": (-1,)}, "a stop token id"),
        ({"stop_token_ids": (1.0,)}, "a stop token id must be an integer of at least 0, got 1.0"),
        ({"stop_token_ids": [1]}, r"stop_token_ids must be a tuple of token ids such as \(1, 2\), got \[1\]"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a tuple"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be a tuple"),
        ({"ignore_eos": "yes"}, "ignore_eos='yes' must be True or False"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": -1e-40}, "temperature=-1e-40 must be a finite number"),
        ({"temperature": 10**5000}, "temperature=an integer of 16610 bits must be a finite number"),
        ({"max_new_tokens": -(10**5000)}, "at least 1, got an integer of 16610 bits"),
        ({"temperature": True}, "temperature=True"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"top_p": "1"}, "top_p='1'"),
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


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"request_id": 5}, "request_id that is not empty, as text; got 5"),
        ({"request_id": "\ud800"}, "characters that cannot be printed"),
        ({"prompt": [1]}, r"the prompt of request 'a' must be a tuple of token ids such as \(1, 2\), got \[1\]"),
        ({"prompt": b"abc"}, "the prompt of request 'a' must be a tuple"),
        ({"sampling": None}, "the sampling of request 'a' must be SamplingParams, got None"),
        ({"made": [1]}, "what request 'a' has made must be a tuple of token ids"),
        ({"made": (1,) * 64}, "what request 'a' has made is 64 tokens already, of at most 64"),
    ],
)
def test_values_of_other_types_are_no_request(values: dict[str, object], text: str) -> None:
    good: dict[str, object] = {"request_id": "a", "prompt": (1,), "sampling": SamplingParams()}
    with pytest.raises(RequestError, match=text):
        Request(**good | values)  # type: ignore[arg-type]  # wrong on purpose


def test_an_abort_names_a_request_by_text() -> None:
    with pytest.raises(RequestError, match=r"as text; got \[\]"):
        Abort([])  # type: ignore[arg-type]  # wrong on purpose


@given(
    st.builds(
        lambda **values: values,
        max_new_tokens=JUNK,
        temperature=JUNK,
        top_k=JUNK,
        top_p=JUNK,
        seed=JUNK,
        stop_token_ids=JUNK,
        ignore_eos=JUNK,
    )
)
def test_what_the_constructor_takes_arrives(values: dict[str, object]) -> None:
    """Each field alone, so that one that is refused hides no other."""
    for name, value in values.items():
        try:
            sampling = SamplingParams(**{name: value})  # type: ignore[arg-type]  # mostly wrong on purpose
        except RequestError:
            continue
        request = Request(request_id="a", prompt=(1,), sampling=sampling)
        assert decode_front(encode(Submit(request))) == Submit(request)


def test_what_a_request_holds_at_most() -> None:
    assert Request(request_id="a", prompt=(1, 2, 3), sampling=SamplingParams(max_new_tokens=4)).max_tokens == 7
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=0.1).is_greedy
    assert SamplingParams(temperature=1e-40).is_greedy
