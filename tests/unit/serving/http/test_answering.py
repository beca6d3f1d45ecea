"""Completions and chats over HTTP, through OpenAI's own client: the engine's tokens in OpenAI's shapes; nothing is left."""

import asyncio
import json
import socket
from pathlib import Path

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError
from openai.types import Completion

from parallel_runtime.serving.http.server import HttpServer
from tests.spmd.tiny_models import PROMPTS, greedy_reference
from tests.unit.serving.http.servers import Served, served

pytestmark = pytest.mark.timeout(60)

NEW = 6
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_greedy_token_ids_are_those_of_the_reference(server: Served, model: Path) -> None:
    expected = greedy_reference(model, PROMPTS, NEW)
    prompts = [list(prompt) for prompt in PROMPTS]
    body = {"return_token_ids": True}
    answer = server.openai.completions.create(model="tiny", prompt=prompts, max_tokens=NEW, temperature=0, extra_body=body)
    assert [tuple(choice.model_dump()["token_ids"]) for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 4
    usage = answer.usage
    assert usage is not None
    num_prompt_tokens = sum(map(len, PROMPTS))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (num_prompt_tokens, 24, num_prompt_tokens + 24)
    assert answer.id.startswith("cmpl-")
    assert (answer.model, answer.object) == ("tiny", "text_completion")


def test_a_stream_says_what_a_whole_answer_says(server: Served) -> None:
    whole = server.openai.completions.create(model="tiny", prompt=["Hello", "World"], max_tokens=40, temperature=0.8, seed=3, n=2)
    texts, reasons, usage = [""] * 4, [""] * 4, None
    stream = server.openai.completions.create(
        model="tiny",
        prompt=["Hello", "World"],
        max_tokens=40,
        temperature=0.8,
        seed=3,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == ["length"] * 4
    assert usage == whole.usage


def test_the_stream_is_server_sent_events(server: Served) -> None:
    response = server.post({"prompt": "Hi", "max_tokens": 3, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert len({json.loads(event.removeprefix("data: "))["id"] for event in events}) == 1
    assert "usage" not in json.loads(events[0].removeprefix("data: "))


def test_chats_use_the_models_template(server: Served) -> None:
    prompt = "system:Be brief.;user:Hi there;"
    plain = server.openai.completions.create(model="tiny", prompt=prompt, max_tokens=NEW, temperature=0)
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    chat = server.chat(messages=messages, max_completion_tokens=NEW, temperature=0)
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.choices[0].message.role == "assistant"
    assert chat.usage == plain.usage
    assert chat.object == "chat.completion"


def test_a_streamed_chat_begins_with_the_role(server: Served) -> None:
    first, *rest = server.chat(messages=MESSAGES, max_tokens=NEW, seed=1, stream=True)
    assert first.choices[0].delta.role == "assistant"
    whole = server.chat(messages=MESSAGES, max_tokens=NEW, seed=1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == whole.choices[0].message.content
    assert rest[-1].choices[0].finish_reason == "length"


def test_a_chat_without_a_limit_fills_the_context(server: Served) -> None:
    messages = [{"role": "user", "content": "x" * 490}]
    chat = server.chat(messages=messages)
    assert chat.usage.total_tokens == 512


def test_logprobs_in_both_shapes(server: Served) -> None:
    plain = server.openai.completions.create(model="tiny", prompt="user:Hi;", max_tokens=NEW, temperature=0, logprobs=3)
    told = plain.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.text_offset is not None
    assert told.top_logprobs is not None
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == NEW
    for index, (token, logprob) in enumerate(zip(told.tokens, told.token_logprobs, strict=True)):
        assert max(told.top_logprobs[index].values()) == pytest.approx(logprob)
        assert told.text_offset[index] == len("".join(told.tokens[:index]))
        assert told.top_logprobs[index][token] == pytest.approx(logprob)
    chat = server.chat(messages=MESSAGES, max_tokens=NEW, temperature=0, logprobs=True, top_logprobs=3)
    content = chat.choices[0].logprobs.content
    assert [entry.token for entry in content] == told.tokens
    assert [entry.logprob for entry in content] == pytest.approx(told.token_logprobs)
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    for entry in content:
        assert entry.bytes == (None if "\ufffd" in entry.token else list(entry.token.encode()))
    offsets = []
    stream = server.openai.completions.create(
        model="tiny", prompt="user:Hi;", max_tokens=NEW, temperature=0, logprobs=0, stream=True
    )
    for chunk in stream:
        if chunk.choices[0].logprobs is not None:
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == told.text_offset


def test_stop_texts_and_stop_tokens_end_an_answer(server: Served) -> None:
    free = server.openai.completions.create(
        model="tiny", prompt=[5, 6], max_tokens=30, temperature=0, extra_body={"return_token_ids": True}
    )
    tokens = free.choices[0].model_dump()["token_ids"]
    ended = server.openai.completions.create(
        model="tiny",
        prompt=[5, 6],
        max_tokens=30,
        temperature=0,
        logprobs=0,
        extra_body={"return_token_ids": True, "stop_token_ids": [tokens[4]]},
    )
    first = tokens.index(tokens[4])
    assert ended.choices[0].model_dump()["token_ids"] == tokens[:first]
    assert ended.choices[0].finish_reason == "stop"
    assert ended.usage is not None
    assert ended.usage.completion_tokens == first + 1
    text = free.choices[0].text
    cut = server.openai.completions.create(model="tiny", prompt=[5, 6], max_tokens=30, temperature=0, stop=text[3:5])
    assert cut.choices[0].text == text[: text.index(text[3:5])]
    assert cut.choices[0].finish_reason == "stop"


def test_the_asynchronous_client(server: Served) -> None:
    async def use() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.server.url}/v1", api_key="any", max_retries=0) as client:

            async def one(number: int) -> str:
                text = ""
                stream = await client.completions.create(model="tiny", prompt=f"Number {number}", temperature=0, stream=True)
                async for chunk in stream:
                    text += chunk.choices[0].text
                return text

            return await asyncio.gather(*map(one, range(8)))

    texts = asyncio.run(use())
    plain = server.openai.completions.create(model="tiny", prompt=[f"Number {number}" for number in range(8)], temperature=0)
    assert texts == [choice.text for choice in plain.choices]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_ends_its_requests(server: Served, is_streamed: bool) -> None:
    server.until_idle()
    ended = dict(server.server.service.engine.metrics().num_finished).get("abort", 0)
    body = json.dumps({"prompt": [3, 4], "max_tokens": 500, "n": 2, "stream": is_streamed}).encode()
    host, port = server.server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        if is_streamed:
            assert client.recv(15) == b"HTTP/1.1 200 OK"
        else:

            async def begun(http: HttpServer) -> None:
                while not http.service.engine.metrics().num_running:
                    await asyncio.sleep(0.001)

            server.do(begun)
    server.until_idle()
    assert server.server.service.engine.metrics().num_finished["abort"] == ended + 2
    (status,) = server.do(lambda http: http.service.engine.ask(lambda controls: controls.health()))
    assert status.num_free_blocks == server.server.service.engine.replicas[0].num_blocks


def test_a_client_that_does_not_read_holds_up_nobody(model: Path) -> None:
    with served(model, write_s=0.3) as server:
        listener = server.server._socket
        assert listener is not None
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of the connections that it accepts from here on
        body = json.dumps(
            {"prompt": [3, 4], "max_tokens": 100, "n": 2, "stream": True, "logprobs": 20, "temperature": 0}
        ).encode()
        host, port = server.server.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            assert client.recv(15) == b"HTTP/1.1 200 OK"
            assert server.openai.completions.create(model="tiny", prompt="Hi", max_tokens=5).choices[0].finish_reason == "length"
            server.until_idle()


def test_an_aborted_answer_is_an_error(server: Served) -> None:
    stream = server.openai.completions.create(model="tiny", prompt="Hi", max_tokens=500, stream=True)
    chunks: list[Completion] = [next(iter(stream))]
    server.do(lambda http: http.service.engine.abort())
    with pytest.raises(APIError, match="the server ended this answer before it was whole"):
        chunks.extend(stream)


def test_a_request_that_cannot_be_served_gets_a_status_though_it_is_streamed(server: Served) -> None:
    with pytest.raises(BadRequestError, match="has token 999"):
        server.openai.completions.create(model="tiny", prompt=[999], stream=True)
