"""``parallel-runtime generate``: what it prints, in which order, and how it refuses."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import ExitStack
from subprocess import PIPE

import pytest
from rich.console import Console

from parallel_runtime.cli.generate import _LiveDisplay, _PlainDisplay
from parallel_runtime.cli.main import main
from parallel_runtime.serving import FinishReason, StreamEvent, Usage
from tests.spmd.tiny_models import write_tiny_model

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Has a byte vocabulary, so it takes and gives text."""
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=300))


def run(*arguments: str) -> int:
    return main(["generate", "--executor", "threads", *arguments])


def test_text_on_stdout_and_the_run_on_stderr(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", model, "--tp", "2", "--dp", "2", "--max-new-tokens", "6", "Hello", "World") == 0
    out, err = capsys.readouterr()
    first, second = out.index("Hello"), out.index("World")
    assert first == 0 < second
    assert f"{model} on tp=2 pp=1 dp=2: 4 rank(s) as threads, ready in " in err
    assert "12 tokens in " in err
    assert " tokens/s" in err
    assert "query" not in err


def test_verbose_shows_every_rank(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", model, "--pp", "2", "--dp", "2", "--max-new-tokens", "2", "--verbose", "Hi") == 0
    err = capsys.readouterr().err
    for rank, where in enumerate(("tp=0 pp=0 dp=0", "tp=0 pp=0 dp=1", "tp=0 pp=1 dp=0", "tp=0 pp=1 dp=1")):
        assert f"rank {rank}: {where}, pid " in err
    assert "tensors over local" in err
    assert "replica dp=1: " in err


def test_equal_seeds_repeat_and_others_differ(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for seed in ("1", "1", "2"):
        assert run("--model", model, "--temperature", "1", "--top-k", "50", "--top-p", "0.9", "--seed", seed, "Hello") == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def test_json_is_one_object_per_answer(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("--n", "2", "--temperature", "1", "--seed", "3", "--logprobs", "2", "--max-new-tokens", "4", "--ignore-eos")
    assert run("--model", model, "--json", *wanted, "Hello", "World") == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted((each["index"], each["sample"], each["prompt"]) for each in told) == [
        (0, 0, "Hello"),
        (0, 1, "Hello"),
        (1, 0, "World"),
        (1, 1, "World"),
    ]
    for each in told:
        assert each["finish_reason"] == "length"
        assert each["usage"]["new_tokens"] == len(each["token_ids"]) == len(each["logprobs"]) == 4
        assert all(entry["logprob"] < 0 and len(entry["top"]) == 2 for entry in each["logprobs"])
    first, second = (each["token_ids"] for each in sorted(told, key=lambda each: each["sample"])[::2])
    assert first != second


def test_text_ends_before_a_stop_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", model, "--max-new-tokens", "20", "Hello") == 0
    whole = capsys.readouterr().out
    stop = whole[len("Hello") + 4 : len("Hello") + 6]
    assert run("--model", model, "--max-new-tokens", "20", "--stop", "never there", "--stop", stop, "Hello") == 0
    assert capsys.readouterr().out == whole[: whole.index(stop, len("Hello"))] + "\n"


@pytest.mark.processes
def test_however_it_ends_no_rank_is_left(model: str) -> None:
    flags = ("--tp", "2", "--n", "100", "--max-new-tokens", "120", "--ignore-eos", "--temperature", "1", "--verbose")
    command = [sys.executable, "-m", "parallel_runtime.cli.main", "generate", "--model", model, *flags, "Hello"]
    with ExitStack() as stack:
        endings = ((signal.SIGINT, 130), (signal.SIGTERM, 143))
        fronts = [stack.enter_context(subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True)) for _ in endings]
        for front, (number, code) in zip(fronts, endings, strict=True):
            assert front.stdout is not None
            assert front.stderr is not None
            assert front.stdout.read(6)[:5] == "Hello"
            said = "".join(front.stderr.readline() for _ in range(4))
            ranks = [os.pidfd_open(int(found)) for found in re.findall(r"pid (\d+)", said)]
            assert len(ranks) == 2
            front.send_signal(number)
            assert front.wait(20) == code
            for rank in ranks:
                assert select.select([rank], [], [], 20)[0], "a rank outlives its front"
                os.close(rank)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--tp", "5", "x"), "tp=5 is more than the 4 query heads"),
        (("--tp", "0", "x"), "tp=0"),
        (("--max-new-tokens", "0", "x"), "max_new_tokens must be an integer of at least 1, got 0"),
        (("--max-new-tokens", "500", "x"), "asks for 500 new ones"),
        (("--temperature", "-1", "x"), "temperature=-1.0 must be a finite number >= 0"),
        (("--model", "nowhere", "x"), "no model at 'nowhere'"),
        (("--model", "nowhere", "x", ""), "prompt 2 is empty"),
        (("--chat", "x"), "chat template"),
        (("--logprobs", "1", "x"), "--logprobs is told in JSON only; add --json"),
        (("--min-p", "2", "x"), "min_p=2.0 must be in [0, 1]"),
        (("--stop", "", "x"), "a stop text has 1 to 256 characters"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    arguments: tuple[str, ...], text: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments if "--model" in arguments else ("--model", model, *arguments)
    assert run(*given) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("parallel-runtime: ")


def test_a_prompt_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 2
    assert "PROMPT" in capsys.readouterr().err


def event(index: int, text: str, reason: FinishReason | None = None) -> StreamEvent:
    usage = Usage(num_prompt_tokens=1, num_new_tokens=1)
    return StreamEvent(
        index=index, request_id=str(index), token_ids=(1,), text=text, finish_reason=reason, usage=usage, dp_rank=0
    )


def test_plain_output_is_in_order_and_streams() -> None:
    out = io.StringIO()
    with _PlainDisplay(["A", "B"], out) as display:
        display.update(1, event(1, "b1"))
        assert out.getvalue() == "A"
        display.update(0, event(0, "a1"))
        assert out.getvalue() == "Aa1"
        display.update(1, event(1, "b2", FinishReason.LENGTH))
        display.update(0, event(0, "a2", FinishReason.STOP))
    assert out.getvalue() == "Aa1a2\nBb1b2\n"


def test_a_terminal_sees_texts_and_bars() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with _LiveDisplay(["A", "B"], console, 3) as display:
        display.update(0, event(0, " one"))
        display.update(1, event(1, " two", FinishReason.STOP))
    shown = out.getvalue()
    for part in ("one", "two", "answer 1", "answer 2 (stop)", "1/3"):
        assert part in shown
