"""Parts of the server on their own: what errors become, rates, metrics, models without text, and defaults of the engine."""

from pathlib import Path

import pytest

from parallel_runtime.errors import (
    CheckpointError,
    ContextStateError,
    ParallelRuntimeError,
    PeerLostError,
    QueueFullError,
    RequestError,
)
from parallel_runtime.serving import SamplingParams
from parallel_runtime.serving.http.live import LiveRequests, TokenRates
from parallel_runtime.serving.http.metrics_text import metrics_text
from parallel_runtime.serving.http.refusals import RefusedError, error_body, refusal_of
from parallel_runtime.serving.metrics import EngineMetrics
from tests.spmd.tiny_models import greedy_reference, write_tiny_model
from tests.unit.serving.http.servers import served

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (QueueFullError("full"), 503, "server_error", "queue_full"),
        (RequestError("n=0 is wrong"), 400, "invalid_request_error", "invalid_value"),
        (ContextStateError("closed"), 503, "server_error", "unavailable"),
        (CheckpointError("broken"), 500, "server_error", "model_unusable"),
        (PeerLostError("rank 1 is gone"), 500, "server_error", "engine_failed"),
        (RefusedError(401, "no key"), 401, "authentication_error", None),
    ],
)
def test_every_error_has_a_status(error: ParallelRuntimeError, status: int, kind: str, code: str | None) -> None:
    refusal = refusal_of(error, {"n": 0})
    assert refusal.status == status
    param = "n" if isinstance(error, RequestError) and status == 400 else None
    assert error_body(refusal)["error"] == {"message": str(error), "type": kind, "param": param, "code": code}


def test_only_a_whole_word_names_the_field() -> None:
    assert refusal_of(RequestError("none is left"), {"n": 1}).param is None
    assert refusal_of(RequestError("messages[0] is empty"), {"messages": 1}).param == "messages"


def test_rates_are_of_whole_seconds() -> None:
    rates = TokenRates(most=2)
    for now, tokens in ((0.0, 10), (0.5, 20), (1.0, 30), (1.2, 31), (3.0, 70), (4.0, 70)):
        rates.note(tokens, now)
    assert rates.rates == (20.0, 0.0)


def test_live_requests_are_limited_and_leave() -> None:
    live = LiveRequests(1)
    with live.entered("a", "/x") as entry:
        assert list(live) == [entry]
        with pytest.raises(RefusedError, match="1 requests are under way and the limit is 1"), live.entered("b", "/x"):
            pass
    assert len(live) == 0


def test_labels_are_escaped() -> None:
    text = metrics_text(EngineMetrics().snapshot(), states=(), ranks={}, responses={('/"\\\n', 200): 1}, num_live=0)
    assert 'http_responses_total{path="/\\"\\\\\\n",status="200"} 1' in text


def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    (expected,) = greedy_reference(model, [(3, 4)], 3)
    with served(model) as server:
        body = {"prompt": [3, 4], "max_tokens": 3, "temperature": 0, "logprobs": 1, "return_token_ids": True, "priority": 8}
        (choice,) = server.post(body).json()["choices"]
        assert (choice["text"], tuple(choice["token_ids"])) == ("", expected)
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in expected]
        assert "text needs a tokenizer" in server.error({"prompt": "Hi"})["message"]
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        assert "text needs a tokenizer" in server.error(chat, "/v1/chat/completions")["message"]


def test_the_engines_own_sampling_is_the_default(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", vocab_size=300)
    own = SamplingParams(temperature=0.0, top_k=5, n=3, logprobs=2)
    with served(model, sampling=own) as server:
        body = {"prompt": [3, 4], "max_tokens": 8, "return_token_ids": True}
        choices = server.post(body).json()["choices"]
        assert [tuple(choice["token_ids"]) for choice in choices] == greedy_reference(model, [(3, 4)], 8)
        assert choices[0]["logprobs"] is None
