"""What is refused before it reaches the engine, in OpenAI's shape, and the words it is refused in."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.serving.http.servers import Served, served

pytestmark = pytest.mark.timeout(60)

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with served(model, max_body_bytes=40_000, max_answers=8, read_s=0.5) as each:
        yield each


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"temprature": 1}, "temprature", "unknown field temprature; did you mean temperature?"),
        ({"aa": 1, "bb": 2}, "aa", "unknown fields aa, bb; "),
        ({"echo": True, "best_of": 3}, "echo", "not supported by this server: echo=True, best_of=3; leave them out"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported by this server: logit_bias={'5': 1}; leave it out"),
        ({"temperature": -1}, "temperature", "temperature=-1 must be a finite number >= 0"),
        ({"temperature": "hot"}, "temperature", "temperature='hot' must be a finite number"),
        ({"top_p": 2}, "top_p", "top_p=2 must be in (0, 1]"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be an integer of at least 1, got 0"),
        ({"max_tokens": 5.0}, "max_tokens", "max_tokens must be an integer of at least 1, got 5.0"),
        ({"max_tokens": 3, "min_tokens": 4}, None, "min_new_tokens=4 is more than max_new_tokens=3"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens must be an integer of at least 0, got -1"),
        ({"n": 0}, "n", "n must be an integer of at least 1, got 0"),
        ({"n": 9}, "n", "1 prompts with n=9 are 9 answers; the limit is 8"),
        ({"logprobs": 21}, "logprobs", "logprobs=21 must be at most 20"),
        ({"logprobs": True}, "logprobs", "logprobs must be an integer of at least 0, got True"),
        ({"seed": "x"}, "seed", "seed must be an integer"),
        ({"priority": 9}, "priority", "priority must be an integer from -8 to 8, got 9"),
        ({"priority": True}, "priority", "priority must be an integer from -8 to 8, got True"),
        ({"stop": 5}, "stop", "stop must be a text or a list of texts, got 5"),
        ({"stop": [""]}, None, "a stop text has 1 to 256 characters, got ''"),
        ({"stop_token_ids": 5}, "stop_token_ids", "stop_token_ids must be a list of token ids, got 5"),
        ({"stream": "yes"}, "stream", "stream must be true or false, got 'yes'"),
        ({"stream_options": {}}, "stream_options", "stream_options needs stream=true"),
        ({"stream": True, "stream_options": 5}, "stream_options", "stream_options must be an object"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "unknown field x of stream_options"),
        ({"prompt": None}, "prompt", "prompt must be a text, a list of texts"),
        ({"prompt": []}, "prompt", "prompt must be a text, a list of texts"),
        ({"prompt": ["Hi", 5]}, "prompt", "item 1 is 5"),
        ({"prompt": [[1], [True]]}, "prompt", "item 1 is [True]"),
        ({"prompt": ""}, None, "has an empty prompt; give at least one token"),
        ({"prompt": [300]}, None, "has token 300"),
        ({"prompt": [1] * 600}, None, "the prompt has 600 tokens, and max_tokens=16 is 616 together; the limit is 512 tokens"),
    ],
)
def test_completions_that_are_refused(server: Served, fields: dict[str, Any], param: str | None, text: str) -> None:
    error = server.error({"prompt": "Hi", **fields})
    assert text in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tools": [{"type": "function"}]}, "not supported by this server: tools=[{'type': 'function'}]; leave it out"),
        ({"response_format": {"type": "json_object"}}, "not supported by this server: response_format="),
        ({"reasoning_effort": "low"}, "not supported by this server: reasoning_effort='low'"),
        ({"messages": "Hi"}, "messages must be a list of at least one message, got 'Hi'"),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": [{"content": "Hi"}]}, "messages[0] must be an object with a text 'role'"),
        ({"messages": [{"role": "user", "content": "Hi", "tool_calls": [1]}]}, "messages[0] has tool_calls, which this server"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "got {'type': 'image_url'}"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        ({"logprobs": 2}, "logprobs must be true or false, got 2"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be an integer of at least 1"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "tokens, and no room for an answer; the limit is 512 tokens"),
    ],
)
def test_chats_that_are_refused(server: Served, fields: dict[str, Any], text: str) -> None:
    error = server.error({"messages": [{"role": "user", "content": "Hi"}], **fields}, CHAT)
    assert text in error["message"]


def test_what_asks_for_nothing_is_taken(server: Served) -> None:
    body = {"prompt": "Hi", "max_tokens": 2, "echo": False, "best_of": 1, "suffix": None, "logit_bias": {}, "user": "me"}
    assert server.post({**body, "model": "tiny"}).status_code == 200
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "tools": [], "response_format": {"type": "text"}}
    assert server.post({**chat, "store": False, "metadata": {"a": "b"}}, CHAT).status_code == 200


def test_other_models_are_not_found(server: Served) -> None:
    error = server.error({"prompt": "Hi", "model": "gpt-9"}, status=404)
    assert error["message"] == "there is no model 'gpt-9'; this server has 'tiny'"
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("body", "text"), [(b"{", "the body is no JSON"), (b"[1]", "must be a JSON object"), (b"[" * 9000, "the body is no JSON")]
)
def test_bodies_that_are_no_object(server: Served, body: bytes, text: str) -> None:
    response = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert text in response.json()["error"]["message"]


def test_a_large_body_within_the_limit_is_read(server: Served) -> None:
    response = server.post({"prompt": "x" * 39_000})
    assert "the prompt has 39000 tokens" in response.json()["error"]["message"]


def test_bodies_have_a_type_and_a_longest_length(server: Served) -> None:
    response = server.http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert response.status_code == 415
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = server.http.post("/v1/completions", content=gzip.compress(b'{"prompt": "Hi"}'), headers=headers)
    assert response.status_code == 415
    assert "Content-Encoding: gzip is not read" in response.json()["error"]["message"]
    assert response.headers["connection"] == "close"
    response = server.post({"prompt": "x" * 50_000})
    assert response.status_code == 413
    assert "bytes; the limit is 40000" in response.json()["error"]["message"]
    pieces = (json.dumps("x" * 999).encode() for _ in range(100))
    response = server.http.post("/v1/completions", content=pieces, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert "more than 40000 bytes" in response.json()["error"]["message"]
