"""Any Llama gives the logits of one rank on every split of heads, vocabulary, columns and layers that exists."""

from pathlib import Path
from typing import final

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.layers.sources import TensorSource
from parallel_runtime.models import Checkpoint, ModelConfig, SlotKvCache, load_model
from parallel_runtime.testing.checkpoints import random_state
from parallel_runtime.topology.shards import split_layers
from tests.unit.layers.ranks import on_ranks


@final
class MemoryCheckpoint(Checkpoint):
    """Random weights that were never written to a file."""

    def __init__(self, config: ModelConfig) -> None:
        self.path = Path("memory")
        self.config = config
        self._state = random_state(config)
        self.names = frozenset(self._state)

    def _open(self, name: str) -> TensorSource:
        return self._state[name]

    def close(self) -> None:
        pass


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv = draw(st.integers(1, 4))
    return ModelConfig(
        vocab_size=draw(st.integers(5, 70)),
        hidden_size=draw(st.integers(1, 12)) * 2,
        intermediate_size=draw(st.integers(4, 40)),
        num_layers=draw(st.integers(1, 3)),
        num_query_heads=kv * draw(st.integers(1, 3)),
        num_kv_heads=kv,
        head_dim=draw(st.sampled_from([2, 4, 6])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
    )


@settings(max_examples=60)
@given(config=configs(), data=st.data())
def test_every_split_gives_the_logits_of_one_rank(config: ModelConfig, data: st.DataObject) -> None:
    tp = data.draw(st.integers(1, min(4, config.num_query_heads)), label="tp")
    pp = data.draw(st.integers(1, config.num_layers), label="pp")
    checkpoint = MemoryCheckpoint(config)
    ids = torch.arange(6) % config.vocab_size

    def run(group: GroupCoordinator, num_stages: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
        hidden, positions = ids, torch.arange(len(ids))
        state: dict[str, Tensor] = {}
        for layers in split_layers(config.num_layers, num_stages=num_stages):
            stage = load_model(checkpoint, tp=group, layers=layers)
            cache = SlotKvCache(
                num_layers=len(layers), num_kv_heads=stage.num_kv_heads, head_dim=stage.head_dim, num_slots=1, max_length=8
            )
            with torch.inference_mode():
                hidden = stage(hidden, positions, cache.step([0], [len(ids)]))
            state |= stage.full_state()
        with torch.inference_mode():
            assert torch.equal(stage.greedy(hidden), stage.logits(hidden).argmax(-1))
            return stage.logits(hidden), state

    (expected, _), *_ = on_ranks(1, run)
    for logits, state in on_ranks(tp, lambda group: run(group, pp)):
        assert logits.shape == (len(ids), config.vocab_size)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert state.keys() == checkpoint.names
        assert all(torch.equal(state[name], checkpoint.tensor(name)[:]) for name in state)
