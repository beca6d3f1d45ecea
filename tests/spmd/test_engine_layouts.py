"""The engine on every kind of layout: the tokens of one plain loop, whatever the split, the batch and the memory."""

from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.serving import Engine, SamplingParams, ServingConfig
from parallel_runtime.testing.checkpoints import tiny_moe_config, write_safetensors_checkpoint
from tests.spmd.tiny_models import PROMPTS, greedy_reference, write_tiny_model

pytestmark = pytest.mark.timeout(60)

NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW)

MODELS: dict[str, dict[str, object]] = {
    "plain": {},
    "one KV head": {"num_kv_heads": 1},
    "tied, vocabulary not divisible": {"tie_word_embeddings": True, "vocab_size": 97},
    "biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
}

LAYOUTS = (
    *(ParallelConfig(tp=tp) for tp in (1, 3, 4)),
    *(ParallelConfig(pp=pp) for pp in (2, 3, 4)),
    ParallelConfig(dp=2),
    ParallelConfig(tp=2, pp=2, dp=2),
)


@pytest.mark.parametrize("name", MODELS)
def test_every_split_says_the_same(name: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", **MODELS[name])
    expected = greedy_reference(model, PROMPTS, NEW)
    for parallel in LAYOUTS:
        with Engine(model, parallel=parallel, executor="threads") as engine:
            completions = engine.generate(PROMPTS, GREEDY)
        assert [completion.token_ids for completion in completions] == expected, parallel
        assert [completion.prompt_token_ids for completion in completions] == list(PROMPTS)


EXPERT_LAYOUTS = (
    ParallelConfig(),
    ParallelConfig(tp=2, ep=2),
    ParallelConfig(dp=2),
    ParallelConfig(dp=2, ep=2),
    ParallelConfig(dp=2, etp=2),
    ParallelConfig(tp=2, dp=2, ep=4),
    ParallelConfig(pp=2, dp=2, ep=2),
    ParallelConfig(tp=2, pp=2, dp=2, ep=2),
    ParallelConfig(dp=4, ep=2, order=("pp", "dp", "cp", "tp")),
)


@pytest.mark.parametrize("shared", [False, True])
def test_experts_say_the_same_wherever_they_are(shared: bool, tmp_path: Path) -> None:
    model = write_safetensors_checkpoint(tmp_path / "model", tiny_moe_config(shared=shared, num_layers=4, eos_ids=()))
    expected = greedy_reference(model, PROMPTS, NEW)
    for parallel in EXPERT_LAYOUTS:
        with Engine(model, parallel=parallel, executor="threads") as engine:
            completions = engine.generate(PROMPTS, GREEDY)
            alone = engine.generate(PROMPTS[2:3], GREEDY)  # the other replicas have nothing
            ranks = [line for replica in engine.replicas for line in replica.ranks]
        assert [completion.token_ids for completion in completions] == expected, parallel
        assert alone[0].token_ids == expected[2]
        assert all(f"experts {8 // parallel.ep * parallel.layout.coordinate(int(line[5])).ep}-" in line for line in ranks)


def test_one_layer_and_stages_chosen_by_hand(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    expected = greedy_reference(model, PROMPTS, NEW)
    serving = ServingConfig(stage_layers=(1, 3))
    with Engine(model, parallel=ParallelConfig(pp=2), serving=serving, executor="threads") as engine:
        assert [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_any_number_of_batches_may_be_under_way(num_microbatches: int, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    serving = ServingConfig(num_microbatches=num_microbatches)
    for parallel in (ParallelConfig(pp=3), ParallelConfig(tp=2)):
        with Engine(model, parallel=parallel, serving=serving, executor="threads") as engine:
            completions = engine.generate(PROMPTS, GREEDY)
        assert [completion.token_ids for completion in completions] == greedy_reference(model, PROMPTS, NEW)


def test_the_order_of_the_axes_changes_nothing(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    parallel = ParallelConfig(tp=2, pp=2, dp=2, order=("pp", "dp", "cp", "tp"))
    with Engine(model, parallel=parallel, executor="threads") as engine:
        completions = engine.generate(PROMPTS, GREEDY)
    assert [completion.token_ids for completion in completions] == greedy_reference(model, PROMPTS, NEW)
    assert sorted(completion.dp_rank for completion in completions) == [0, 0, 1, 1]


def test_little_memory_and_small_batches_change_nothing(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    serving = ServingConfig(page_size=3, kv_cache_tokens=48, max_batch_tokens=5, max_batch_requests=3)
    with Engine(model, parallel=ParallelConfig(tp=2, pp=2), serving=serving, executor="threads") as engine:
        completions = engine.generate(PROMPTS, GREEDY)
    assert [completion.token_ids for completion in completions] == greedy_reference(model, PROMPTS, NEW)


def test_one_that_finds_no_room_waits_for_the_other_to_end(tmp_path: Path) -> None:
    """The second batch cannot start while the first is under way, so its slot stays empty."""
    model = write_tiny_model(tmp_path / "model")
    prompts = [PROMPTS[2], PROMPTS[2][::-1]]
    serving = ServingConfig(page_size=4, kv_cache_tokens=32)
    with Engine(model, parallel=ParallelConfig(pp=2), serving=serving, executor="threads") as engine:
        completions = engine.generate(prompts, GREEDY)
    assert [completion.token_ids for completion in completions] == greedy_reference(model, prompts, NEW)


def test_bfloat16_stages_say_what_one_rank_says(tmp_path: Path) -> None:
    """A pipeline computes the same sums in the same order, so even the low precision is equal."""
    model = write_tiny_model(tmp_path / "model")
    said = []
    for parallel in (ParallelConfig(), ParallelConfig(pp=2), ParallelConfig(pp=4)):
        serving = ServingConfig(dtype="bfloat16", num_microbatches=1)
        with Engine(model, parallel=parallel, serving=serving, executor="threads") as engine:
            said.append([completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)])
    assert said[0] == said[1] == said[2]


@pytest.mark.processes
def test_ranks_as_processes(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with Engine(model, parallel=ParallelConfig(tp=2, pp=2)) as engine:
        first = engine.generate(PROMPTS[:2], GREEDY)
        second = engine.generate(PROMPTS[2:], GREEDY)
    assert [completion.token_ids for completion in first + second] == greedy_reference(model, PROMPTS, NEW)
