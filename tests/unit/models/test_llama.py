"""A tiny Llama equals ``transformers`` on the same weights, however it is split."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError, CheckpointError, ConfigError
from parallel_runtime.models import LlamaConfig, LlamaForCausalLM, SlotKvCache, load_llama, open_checkpoint
from parallel_runtime.testing.checkpoints import (
    random_llama_state,
    tiny_llama_config,
    write_gguf_checkpoint,
    write_safetensors_checkpoint,
)
from parallel_runtime.topology.shards import split_layers
from tests.unit.layers.ranks import alone, on_ranks

IDS = torch.tensor([1, 50, 100, 7, 51, 99, 3, 3, 0, 64, 20])

CONFIGS = {
    "plain": tiny_llama_config(),
    "tied": tiny_llama_config(tie_word_embeddings=True),
    "one kv head": tiny_llama_config(num_kv_heads=1),
    "as many kv heads": tiny_llama_config(num_kv_heads=4),
    "9 query and 3 kv heads": tiny_llama_config(num_query_heads=9, num_kv_heads=3, head_dim=4, hidden_size=36),
    "one layer": tiny_llama_config(num_layers=1),
    "biases": tiny_llama_config(attention_bias=True, mlp_bias=True),
    "odd widths": tiny_llama_config(hidden_size=20, intermediate_size=37, head_dim=6),
}


def new_cache(model: LlamaForCausalLM, *, num_slots: int = 1) -> SlotKvCache:
    return SlotKvCache(
        num_layers=len(model.layers),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_slots=num_slots,
        max_length=64,
        dtype=model.dtype,
    )


@torch.inference_mode()
def logits_of(stages: list[LlamaForCausalLM], ids: Tensor = IDS, *, chunks: tuple[int, ...] = ()) -> Tensor:
    """Logits of one sequence that goes through the stages in chunks."""
    caches = [new_cache(stage) for stage in stages]
    done, rows = 0, []
    for count in chunks or (len(ids),):
        hidden, positions = ids[done : done + count], torch.arange(done, done + count)
        for stage, cache in zip(stages, caches, strict=True):
            hidden = stage(hidden, positions, cache.step([0], [count]))
        rows.append(stages[-1].logits(hidden))
        done += count
    return torch.cat(rows)


@torch.inference_mode()
def reference_logits(config: LlamaConfig, ids: Tensor = IDS, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same from ``transformers``, which is handed the weights themselves and none of our code."""
    import transformers

    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_query_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=config.tie_word_embeddings,
            attention_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )
    )
    state = random_llama_state(config)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    reference.load_state_dict(state)
    logits: Tensor = reference.to(dtype)(ids.unsqueeze(0)).logits[0]
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_for_every_split(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    folder = write_safetensors_checkpoint(tmp_path / "model", config)
    reference = reference_logits(config)

    def run(tp: GroupCoordinator) -> list[Tensor]:
        with open_checkpoint(folder) as checkpoint:
            found = []
            for num_stages in {1, config.num_layers}:
                stages = [load_llama(checkpoint, tp=tp, layers=part) for part in split_layers(config.num_layers, num_stages=num_stages)]
                found.append(logits_of(stages))
        return found

    for tp in (1, 2, 3, 4):
        for rank, found in enumerate(on_ranks(tp, run)):
            for logits in found:
                assert logits.shape == (len(IDS), config.vocab_size)
                torch.testing.assert_close(logits, reference, atol=1e-4, rtol=0, msg=lambda text: f"tp={tp} rank={rank}: {text}")
