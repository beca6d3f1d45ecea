"""The server around the answers: who may come in, how many, how it says how it is, and how it ends."""

import asyncio
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest
from openai import AuthenticationError, OpenAI
from pydantic import SecretStr

from parallel_runtime.errors import ConfigError
from parallel_runtime.serving import AsyncEngine, ServingConfig
from parallel_runtime.serving.http import HttpSettings
from parallel_runtime.serving.http.server import HttpServer, serve_http
from parallel_runtime.serving.http.service import ServiceState, model_name
from tests.unit.serving.http.servers import Served, served

pytestmark = pytest.mark.timeout(60)


def test_the_model_is_listed(server: Served) -> None:
    (told,) = server.openai.models.list().data
    assert told.id == server.openai.models.retrieve("tiny").id == "tiny"
    response = server.http.get("/v1/models/other/one")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "there is no model 'other/one'; this server has 'tiny'"


def test_health_is_told(server: Served) -> None:
    response = server.http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "serving", "replicas": ["serving"]})


def test_unknown_paths_and_methods_are_told_in_the_same_shape(server: Served) -> None:
    response = server.http.get("/v2")
    assert (response.status_code, response.json()["error"]["message"]) == (404, "there is no /v2 here")
    response = server.http.get("/v1/completions")
    assert (response.status_code, response.json()["error"]["message"]) == (405, "/v1/completions does not take GET")


def test_metrics_are_prometheus_text(server: Served) -> None:
    server.openai.completions.create(model="tiny", prompt="Hi", max_tokens=3)
    response = server.http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values, kinds = {}, {}
    for line in response.text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert name not in values
            values[name] = float(value)
            assert any(name.startswith(known) for known in kinds)
    assert values["parallel_runtime_new_tokens_total"] >= 3
    assert values['parallel_runtime_requests_finished_total{reason="length"}'] >= 1
    assert values['parallel_runtime_replica_up{replica="0"}'] == 1
    assert values['parallel_runtime_kv_blocks_free{dp_rank="0"}'] == 256
    count = values["parallel_runtime_request_seconds_count"]
    assert count == values['parallel_runtime_request_seconds_bucket{le="+Inf"}'] >= 1
    assert values['parallel_runtime_http_responses_total{path="/v1/completions",status="200"}'] >= 1
    assert 'path="/v2"' not in response.text


def test_the_page_is_one_file_that_asks_nobody_else(server: Served) -> None:
    response = server.http.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "//" not in response.text.replace("data:,", "")
    assert "innerHTML" not in response.text


def test_status_tells_ranks_groups_and_requests(server: Served) -> None:
    with server.openai.completions.create(model="tiny", prompt="Hello", max_tokens=500, stream=True) as stream:
        next(stream)
        told = server.http.get("/status").json()
        (live,) = told["requests"]
        assert (live["path"], live["num_prompt_tokens"], live["is_streamed"], live["dp_ranks"]) == (
            "/v1/completions",
            5,
            True,
            [0],
        )
        assert live["num_new_tokens"] >= 1
    server.until_idle()
    told = server.http.get("/status").json()
    assert (told["state"], told["model"], told["requests"]) == ("serving", "tiny", [])
    (replica,) = told["replicas"]
    assert [rank.split(":")[0] for rank in replica["leaders"][0]["ranks"]] == ["rank 0", "rank 1"]
    assert {"ranks": [[0, 1]], "names": next(each["names"] for each in told["groups"] if "tp" in each["names"])} in told["groups"]
    assert told["sizes"]["tp"] == 2


def test_live_operations_of_ranks_and_what_their_groups_did_are_told(model: Path) -> None:
    with served(model, serving={"count_operations": True}) as server:
        server.openai.completions.create(model="tiny", prompt="Hello", max_tokens=4)
        server.until_idle()
        (leader,) = server.http.get("/status").json()["replicas"][0]["leaders"]
        sleeping, waiting = leader["doing"]
        assert (sleeping["operation"], sleeping["is_silent"], sleeping["failures"]) == (None, False, [])
        assert "channel 'steps' recv from member 0" in waiting["operation"]
        assert waiting["seconds"] >= 0
        samples = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith("parallel_runtime_operat")]
    for rank in (0, 1):
        found = [line for line in samples if f'{{replica="0",rank="{rank}",group="tp#0",operation="all_reduce_"}}' in line]
        assert [line.split("{")[0].removeprefix("parallel_runtime_") for line in found] == [
            "operations_total",
            "operation_bytes_total",
            "operation_seconds_total",
            "operation_waited_seconds_total",
        ]
        assert all(float(line.split()[-1]) > 0 for line in found[:3])


def test_a_key_is_wanted_everywhere_but_for_health_and_the_empty_page(model: Path) -> None:
    with served(model, api_key=SecretStr("sk-1")) as server:
        for path in ("/v1/models", "/metrics", "/status", "/v1/completions"):
            response = server.http.get(path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
        assert "wants an API key" in response.json()["error"]["message"]
        for path in ("/health", "/"):
            assert server.http.get(path).status_code == 200
        with pytest.raises(AuthenticationError, match="the API key is wrong"):
            server.openai.models.list()
        with OpenAI(base_url=f"{server.server.url}/v1", api_key="sk-1") as client:
            assert client.completions.create(model="tiny", prompt="Hi", max_tokens=1).choices
        for header, status in (
            ("bearer sk-1", 200),
            ("Basic sk-1", 401),
            ("sk-1", 401),
            ("Bearer é", 401),
        ):
            sent = [(b"authorization", header.encode("latin-1"))]
            assert server.http.get("/v1/models", headers=sent).status_code == status


def test_requests_beyond_a_limit_are_told_to_come_again(model: Path) -> None:
    with (
        served(model, max_requests=1) as server,
        server.openai.completions.create(model="tiny", prompt="Hi", max_tokens=500, stream=True) as stream,
    ):
        next(stream)
        response = server.post({"prompt": "Hi"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["message"] == "1 requests are under way and the limit is 1; try again later"


def test_a_full_queue_of_the_engine_is_told(model: Path) -> None:
    with (
        served(model, serving={"max_waiting": 2, "max_batch_requests": 1}) as server,
        server.openai.completions.create(model="tiny", prompt=["Hi", "Ho"], max_tokens=500, stream=True) as stream,
    ):
        next(stream)
        response = server.post({"prompt": "Hi"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "2 requests are under way and the limit is 2" in response.json()["error"]["message"]


def test_connections_beyond_a_limit_are_turned_away_and_silent_ones_ended(model: Path) -> None:
    with served(model, max_connections=2, read_s=0.3) as server:
        host, port = server.server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as first, socket.create_connection((host, int(port))) as second:
            with socket.create_connection((host, int(port))) as third:
                answer = third.recv(4096)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"2 connections are open, which is the limit" in answer
            for silent in (first, second):
                assert silent.recv(1) == b""
        assert server.http.get("/health").status_code == 200


def test_a_body_that_does_not_arrive_is_given_up(model: Path) -> None:
    with served(model, read_s=0.2) as server:
        host, port = server.server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
            client.sendall(head.encode())
            assert client.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_draining_lets_running_answers_end_and_refuses_others(server: Served, model: Path) -> None:
    with served(model) as each:
        stream = each.openai.completions.create(model="tiny", prompt="Hi", max_tokens=100, stream=True)
        next(stream)
        over = threading.Event()
        result: list[bool] = []

        def drain() -> None:
            result.append(each.do(lambda http: http.drain()))
            over.set()

        thread = threading.Thread(target=drain)
        thread.start()
        while each.server.service.state is not ServiceState.DRAINING:
            pass
        response = each.post({"prompt": "Hi"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert "shutting down" in response.json()["error"]["message"]
        response = each.http.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "draining")
        assert list(stream)[-1].choices[0].finish_reason == "length"
        thread.join(30)
        assert result == [True]


def test_a_drain_has_an_end(model: Path) -> None:
    with served(model) as each, each.openai.completions.create(model="tiny", prompt="Hi", max_tokens=500, stream=True) as stream:
        next(stream)
        assert each.do(lambda http: http.drain(0.05)) is False


def test_it_says_that_it_starts_and_that_it_is_closed(model: Path) -> None:
    async def main() -> None:
        engine = AsyncEngine(model, executor="threads", serving=ServingConfig(kv_cache_tokens=1024))
        async with HttpServer(engine, HttpSettings(port=0)) as server, httpx2.AsyncClient(base_url=server.url) as http:
            response = await http.get("/health")
            assert (response.status_code, response.json()) == (503, {"status": "starting", "replicas": ["starting"]})
            response = await http.post("/v1/completions", json={"prompt": "Hi"})
            assert (response.status_code, response.headers["retry-after"]) == (503, "5")
            assert "the model is being loaded" in response.json()["error"]["message"]
            assert (await http.get("/status")).json()["state"] == "starting"
            async with engine:
                assert (await http.post("/v1/completions", json={"prompt": "Hi"})).status_code == 200
            assert (await http.get("/health")).json() == {"status": "closed", "replicas": ["lost"]}
            response = await http.post("/v1/completions", json={"prompt": "Hi"})
            assert response.status_code == 503
            assert "no replica is left" in response.json()["error"]["message"]

    asyncio.run(main())


def test_an_address_that_cannot_be_listened_on_is_told_before_anything_starts(server: Served, model: Path) -> None:
    port = int(server.server.url.rpartition(":")[2])
    for settings, text in (
        (HttpSettings(port=port), "another program listens there; choose another port, or 0 for any free one"),
        (HttpSettings(host="no.such.host.invalid"), "is no address to listen on"),
        (HttpSettings(host="192.0.2.1", port=0), "Cannot assign requested address"),
    ):
        engine = AsyncEngine(model, executor="threads")
        with pytest.raises(ConfigError, match=text):
            asyncio.run(serve_http(engine, settings, say=lambda _, what: None))
        assert engine.state == "new"


def test_load_from_another_process(server: Served) -> None:
    """64 requests at once: each gets its own answer, and meanwhile the loop turns."""
    script = """
import asyncio, sys
from openai import AsyncOpenAI
async def main():
    async with AsyncOpenAI(base_url=sys.argv[1], api_key="x", max_retries=0) as client:
        async def one(number):
            stream = await client.completions.create(model="tiny", prompt=[number + 3], max_tokens=8, temperature=0, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])
        for text in await asyncio.gather(*map(one, range(64))):
            print(ascii(text))
asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, f"{server.server.url}/v1"], stdout=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None:
            assert server.http.get("/health").status_code == 200
        assert process.stdout is not None
        texts = process.stdout.read().splitlines()
    assert process.returncode == 0
    prompts = [[number + 3] for number in range(64)]
    plain = server.openai.completions.create(model="tiny", prompt=prompts, max_tokens=8, temperature=0)
    assert texts == [ascii(choice.text) for choice in plain.choices]


def test_names_of_models() -> None:
    assert model_name("smollm2") == "smollm2"
    assert model_name("/some/where/Tiny-Llama/") == "Tiny-Llama"
    assert model_name("/some/where/tiny.Q8_0.gguf") == "tiny.Q8_0"


def test_what_is_no_http_harms_nobody(server: Served) -> None:
    host, port = server.server.url.removeprefix("http://").split(":")
    for garbage in (b"\x16\x03\x01\x02\x00\n\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n"):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(garbage)
            assert client.recv(4096).startswith(b"HTTP/1.1 400 ")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
        )
    server.until_idle()
    assert server.http.get("/health").status_code == 200
