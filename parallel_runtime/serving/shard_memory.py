"""How much memory one rank's part of a model takes, from the model's sizes alone. Pure.

What is counted: weights, and keys and values of the KV cache. Activations, the allocator's slack and copies that exist while
weights are read are not.
"""

from dataclasses import dataclass
from typing import final

from parallel_runtime.models.config import MixtureConfig, ModelConfig
from parallel_runtime.topology import Layout
from parallel_runtime.topology.shards import HeadShard, split_even, split_experts, split_heads

__all__ = ["RankShard", "rank_shard"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankShard:
    """What one rank holds.

    Attributes:
        layers: Layers, as numbers of the whole model.
        heads: Its attention heads.
        num_weights: Numbers in its weights.
        kv_per_token: Numbers in its KV cache for each token.
    """

    layers: range
    heads: HeadShard
    num_weights: int
    kv_per_token: int


def rank_shard(config: ModelConfig, layout: Layout, rank: int, stages: tuple[range, ...]) -> RankShard:
    """Work out what one rank holds.

    Args:
        config: Of the model.
        layout: The world.
        rank: The rank.
        stages: Layers of each pipeline stage.

    Returns:
        Its shard.

    Raises:
        ConfigError: The heads cannot be cut like this.
    """
    place = layout.coordinate(rank)
    layers = stages[place.pp]
    heads = split_heads(config.num_query_heads, config.num_kv_heads, parts=layout.tp)[place.tp]
    inner = len(split_even(config.intermediate_size, parts=layout.tp)[place.tp])
    attention = 2 * (len(heads.query) + len(heads.kv)) * config.head_dim
    total = 0
    for layer in layers:
        mixture = config.mixture_of(layer)
        feed_forward = 3 * inner if mixture is None else _experts(mixture, layout, place.ep, place.etp, place.tp)
        total += config.hidden_size * (attention + feed_forward + 2)
    vocabulary = len(split_even(config.vocab_size, parts=layout.tp)[place.tp]) * config.hidden_size
    is_first, is_last = place.pp == 0, place.pp == layout.pp - 1
    total += vocabulary * (is_first + is_last - (is_first and is_last and config.tie_word_embeddings))
    return RankShard(
        layers=layers, heads=heads, num_weights=total, kv_per_token=2 * len(layers) * len(heads.kv) * config.head_dim
    )


def _experts(mixture: MixtureConfig, layout: Layout, ep: int, etp: int, tp: int) -> int:
    """Columns of the router, of this rank's experts, and of its part of the shared one."""
    own = len(split_experts(mixture.num_experts, ep=layout.ep)[ep])
    inner = len(split_even(mixture.intermediate_size, parts=layout.etp)[etp])
    shared = len(split_even(mixture.shared_intermediate_size, parts=layout.tp)[tp])
    return mixture.num_experts + 3 * (own * inner + shared)
