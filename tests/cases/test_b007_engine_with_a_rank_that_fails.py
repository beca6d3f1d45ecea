"""B007, through an engine: the model fails on one tensor-parallel rank, and everyone who waits hears of it."""

import time
from pathlib import Path

import pytest
from torch import Tensor

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ParallelRuntimeError
from parallel_runtime.serving import Batch, Engine, ModelRunner, SamplingParams
from tests.spmd.tiny_models import PROMPTS, write_tiny_model

LIMIT_S = 10


@pytest.mark.timeout(60)
def test_b007_every_request_under_way_gets_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ModelRunner.forward

    def fail(runner: ModelRunner, batch: Batch, hidden_TD: Tensor | None = None) -> Tensor:
        is_second = runner.model.embed_tokens is not None and runner.model.embed_tokens.tp.rank_in_group == 1
        if is_second and any(chunk.request_id.endswith("1") and chunk.start > 20 for chunk in batch.chunks):
            raise FloatingPointError("planted")
        return forward(runner, batch, hidden_TD)

    monkeypatch.setattr(ModelRunner, "forward", fail)
    model = write_tiny_model(tmp_path / "model")
    with Engine(model, parallel=ParallelConfig(tp=2), executor="threads") as engine:
        streams = [engine.stream([prompt], SamplingParams(max_new_tokens=100)) for prompt in PROMPTS[:3]]
        for stream in streams:
            next(stream)
        started = time.monotonic()
        for stream in streams:
            with pytest.raises(ParallelRuntimeError, match="planted"):
                for _ in stream:
                    pass
        assert time.monotonic() - started < LIMIT_S
        with pytest.raises(ParallelRuntimeError, match="planted"):
            engine.generate(PROMPTS[:1])
