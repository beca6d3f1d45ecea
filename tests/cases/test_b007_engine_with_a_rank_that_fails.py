"""B007, through an engine: the model fails on one tensor-parallel rank, and everyone who waits hears of it."""

import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import pytest
from torch import Tensor

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ParallelRuntimeError
from parallel_runtime.serving import Batch, Engine, ModelRunner, SamplingParams, ServingConfig, executors
from tests.spmd.tiny_models import PROMPTS, write_tiny_model

LIMIT_S = 10
FORWARD, SERVE = ModelRunner.forward, executors.serve_rank_process


def fail_late(runner: ModelRunner, batch: Batch, hidden_TD: Tensor | None = None) -> Tensor:
    """``ModelRunner.forward``, which on the second tensor-parallel rank cannot do one request."""
    is_second = runner.model.embed_tokens is not None and runner.model.embed_tokens.tp.rank_in_group == 1
    if is_second and any(chunk.request_id.endswith("1") and chunk.start > 20 for chunk in batch.chunks):
        raise FloatingPointError("planted")
    return FORWARD(runner, batch, hidden_TD)


def leave_late(runner: ModelRunner, batch: Batch, hidden_TD: Tensor | None = None) -> Tensor:
    """The same, where a library ends the process."""
    try:
        return fail_late(runner, batch, hidden_TD)
    except FloatingPointError:
        os._exit(3)


def serve_until_it_fails(
    ctx: ParallelContext, model: str, config: ServingConfig, links: Sequence[Connection], num_threads: int | None = None
) -> None:
    """What a rank's process runs instead of ``serve_rank_process``."""
    setattr(ModelRunner, "forward", fail_late)  # noqa: B010  # mypy refuses to assign to a method
    SERVE(ctx, model, config, links, num_threads)


def serve_until_it_leaves(
    ctx: ParallelContext, model: str, config: ServingConfig, links: Sequence[Connection], num_threads: int | None = None
) -> None:
    """The same, where the process is ended."""
    setattr(ModelRunner, "forward", leave_late)  # noqa: B010
    SERVE(ctx, model, config, links, num_threads)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("executor", ["threads", pytest.param("processes", marks=pytest.mark.processes)])
def test_b007_every_request_under_way_gets_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: Literal["threads", "processes"]
) -> None:
    if executor == "threads":
        monkeypatch.setattr(ModelRunner, "forward", fail_late)
    else:
        monkeypatch.setattr(executors, "serve_rank_process", serve_until_it_fails)
    all_get_the_error(write_tiny_model(tmp_path / "model"), executor, "planted")


@pytest.mark.timeout(60)
@pytest.mark.processes
def test_b007_a_rank_whose_process_ends_in_silence_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "serve_rank_process", serve_until_it_leaves)
    all_get_the_error(write_tiny_model(tmp_path / "model"), "processes", "rank 1 of 2 .*exit.* 3")


def all_get_the_error(model: Path, executor: Literal["threads", "processes"], text: str) -> None:
    """Every stream under way, and every call afterwards, ends with an error that says so, and the engine keeps it."""
    with Engine(model, parallel=ParallelConfig(tp=2), executor=executor) as engine:
        assert not engine.failure
        streams = [engine.stream([prompt], SamplingParams(max_new_tokens=100)) for prompt in PROMPTS[:3]]
        for stream in streams:
            next(stream)
        started = time.monotonic()
        for stream in streams:
            with pytest.raises(ParallelRuntimeError, match=text):
                for _ in stream:
                    pass
        assert time.monotonic() - started < LIMIT_S
        with pytest.raises(ParallelRuntimeError, match=text) as raised:
            engine.generate(PROMPTS[:1])
        assert engine.failure == raised.value
    assert engine.failure == raised.value
