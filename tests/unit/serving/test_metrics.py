"""Counts and times of an engine's front."""

import pytest

from parallel_runtime.serving.answers import StreamEvent, Usage
from parallel_runtime.serving.messages import FinishReason
from parallel_runtime.serving.metrics import EngineMetrics, Histogram


def event(*tokens: int, reason: FinishReason | None = None) -> StreamEvent:
    usage = Usage(num_prompt_tokens=1, num_new_tokens=len(tokens))
    return StreamEvent(index=0, request_id="a", token_ids=tokens, text="", finish_reason=reason, usage=usage, dp_rank=0)


def test_requests_wait_run_and_end() -> None:
    metrics = EngineMetrics()
    first, second, third = metrics.start(5), metrics.start(6), metrics.start(7)
    first.note(event(1))
    first.note(event(2, 3))
    second.note(event(4, reason=FinishReason.LENGTH))
    third.end("error")
    third.end("abort")
    now = metrics.snapshot()
    assert (now.num_running, now.num_waiting) == (1, 0)
    assert now.num_finished == {"length": 1, "error": 1}
    assert (now.num_prompt_tokens, now.num_new_tokens) == (18, 4)
    counts = (now.time_to_first_token.count, now.time_between_tokens.count, now.request_time.count)
    assert counts == (2, 2, 2)
    assert now.request_time.sum_s > 0


def test_quantiles_lie_within_their_bucket() -> None:
    histogram = Histogram(bounds_s=(1.0, 2.0, 4.0), counts=(2, 0, 2, 1), sum_s=9.0)
    assert histogram.quantile(0.2) == pytest.approx(0.5)
    assert histogram.quantile(0.6) == pytest.approx(3.0)
    assert histogram.quantile(1.0) == 4.0
    assert Histogram(bounds_s=(1.0,), counts=(0, 0), sum_s=0.0).quantile(0.5) == 0.0
