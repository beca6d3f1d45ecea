"""B063: a batch that the data-parallel ranks do not divide."""

from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigError
from parallel_runtime.serving import Engine, SamplingParams, ServingConfig
from parallel_runtime.testing.checkpoints import tiny_moe_config, write_safetensors_checkpoint
from tests.spmd.tiny_models import PROMPTS, greedy_reference, write_tiny_model
from tests.unit.layers.ranks import sizes_of

pytestmark = pytest.mark.timeout(30)


def test_b063_shares_and_order(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    reference = greedy_reference(model, PROMPTS, 9)
    with Engine(model, parallel=ParallelConfig(dp=2), executor="threads") as engine:
        for count, shares in ((3, [1, 2]), (1, [0, 1]), (0, [0, 0])):
            completions = engine.generate(PROMPTS[:count], SamplingParams(max_new_tokens=9))
            ranks = [completion.dp_rank for completion in completions]
            assert sorted(ranks.count(rank) for rank in range(2)) == shares
            assert [completion.token_ids for completion in completions] == reference[:count]


def test_b063_results_of_different_lengths(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    reference = greedy_reference(model, PROMPTS, 9)
    lengths = (9, 2, 5)
    sampling = [SamplingParams(max_new_tokens=length) for length in lengths]
    with Engine(model, parallel=ParallelConfig(dp=2), executor="threads") as engine:
        completions = engine.generate(PROMPTS[:3], sampling)
    assert [completion.token_ids for completion in completions] == [
        tokens[:length] for tokens, length in zip(reference, lengths, strict=False)
    ]


def test_b063_a_batch_of_nothing_is_refused() -> None:
    for name in ("num_microbatches", "max_batch_requests", "max_batch_tokens", "page_size"):
        with pytest.raises(ConfigError, match=name):
            ServingConfig.model_validate({name: 0})


SPANNED = (ParallelConfig(dp=2, ep=2), ParallelConfig(dp=3, ep=3), ParallelConfig(dp=2, etp=2))


@pytest.mark.parametrize("parallel", SPANNED, ids=sizes_of)
def test_b063_shares_and_lengths_where_experts_span_the_ranks(parallel: ParallelConfig, tmp_path: Path) -> None:
    model = write_safetensors_checkpoint(tmp_path / "model", tiny_moe_config(mixture={"num_experts": 6}, eos_ids=()))
    reference = greedy_reference(model, PROMPTS, 9)
    lengths = (9, 2, 5, 7)
    with Engine(model, parallel=parallel, executor="threads") as engine:
        for count in (3, 1, 0, 4):
            sampling = [SamplingParams(max_new_tokens=length) for length in lengths[:count]]
            completions = engine.generate(PROMPTS[:count], sampling)
            assert [completion.token_ids for completion in completions] == [
                tokens[:length] for tokens, length in zip(reference[:count], lengths, strict=False)
            ]
