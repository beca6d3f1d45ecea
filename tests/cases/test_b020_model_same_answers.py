"""B020, the model's part: the same greedy tokens whatever the split, the run and the company in the batch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.models import CausalLM, SlotKvCache, load_model, open_checkpoint
from parallel_runtime.testing.checkpoints import tiny_llama_config, write_safetensors_checkpoint
from parallel_runtime.topology.shards import split_layers
from tests.unit.layers.ranks import alone, on_ranks

PROMPTS = ([5, 17, 99], [1], [100, 2, 3, 50, 51, 7, 7], [42] * 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_llama_config(num_query_heads=9, num_kv_heads=3, head_dim=8, hidden_size=72)
    return write_safetensors_checkpoint(tmp_path_factory.mktemp("b020") / "model", config)


@torch.inference_mode()
def generate(stages: list[CausalLM], prompts: tuple[list[int], ...], count: int) -> tuple[list[list[int]], Tensor]:
    """Greedy tokens of a batch of prompts, and the logits of every step."""
    caches = [
        SlotKvCache(
            num_layers=len(stage.layers),
            num_kv_heads=stage.num_kv_heads,
            head_dim=stage.head_dim,
            num_slots=len(prompts),
            max_length=64,
        )
        for stage in stages
    ]
    rows, steps, logits = [list(prompt) for prompt in prompts], [], []
    lengths = [0] * len(prompts)
    for _ in range(count):
        counts = [len(row) for row in rows]
        hidden = torch.tensor([token for row in rows for token in row])
        positions = torch.cat([torch.arange(start, start + new) for start, new in zip(lengths, counts, strict=True)])
        for stage, cache in zip(stages, caches, strict=True):
            hidden = stage(hidden, positions, cache.step(range(len(prompts)), counts))
        last = hidden[torch.tensor(counts).cumsum(0) - 1]
        chosen = stages[-1].greedy(last)
        logits.append(stages[-1].logits(last))
        lengths = [start + new for start, new in zip(lengths, counts, strict=True)]
        rows = [[token] for token in chosen.tolist()]
        steps.append(chosen)
    return torch.stack(steps, dim=1).tolist(), torch.stack(logits)


def run(model: Path, *, tp: int = 1, pp: int = 1) -> tuple[list[list[int]], Tensor]:
    def on_rank(group: GroupCoordinator) -> tuple[list[list[int]], Tensor]:
        with open_checkpoint(model) as checkpoint:
            parts = split_layers(checkpoint.config.num_layers, num_stages=pp)
            stages = [load_model(checkpoint, tp=group, layers=part) for part in parts]
        return generate(stages, PROMPTS, 32)

    outcomes = on_ranks(tp, on_rank)
    for tokens, logits in outcomes[1:]:
        assert tokens == outcomes[0][0]
        assert torch.equal(logits, outcomes[0][1]), "ranks of one group differ"
    return outcomes[0]


def test_b020_every_split_gives_the_same_tokens(model: Path) -> None:
    tokens, logits = run(model)
    assert len({tuple(row) for row in tokens}) == len(PROMPTS), "the prompts would not tell a mix-up"
    for tp, pp in ((2, 1), (3, 1), (4, 1), (1, 2), (2, 2)):
        other, other_logits = run(model, tp=tp, pp=pp)
        assert other == tokens, f"tp={tp} pp={pp}"
        assert (other_logits - logits).abs().max() <= 1e-4, f"tp={tp} pp={pp}"


def test_b020_two_runs_are_bit_identical(model: Path) -> None:
    (first_tokens, first), (second_tokens, second) = run(model, tp=2), run(model, tp=2)
    assert first_tokens == second_tokens
    assert torch.equal(first, second)


def test_b020_a_prompt_alone_gives_the_tokens_it_gives_in_a_batch(model: Path) -> None:
    together, _ = run(model)
    with open_checkpoint(model) as checkpoint:
        stages = [load_model(checkpoint, tp=alone())]
    for prompt, expected in zip(PROMPTS, together, strict=True):
        tokens, _ = generate(stages, (prompt,), 32)
        assert tokens == [expected]
