"""Which layers each pipeline stage holds, so that all of them take about as long for a token."""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

from parallel_runtime.models.config import ModelConfig
from parallel_runtime.topology.shards import split_layers

__all__ = ["split_stages"]


def split_stages(config: ModelConfig, *, num_stages: int, sizes: Sequence[int] | None = None) -> tuple[range, ...]:
    """Cut the layers of a model over pipeline stages.

    A decode step takes as long as reading the weights it needs, and the last stage also reads the head. With a large vocabulary
    that is worth several layers, which the other stages then hold; every one holds one at least.

    Args:
        config: Of the model.
        num_stages: Pipeline stages, at most as many as layers.
        sizes: How many layers each stage gets, where that is not to be chosen here.

    Returns:
        One range of layer numbers for each stage.

    Raises:
        ConfigError: A stage would be empty, or ``sizes`` does not add up.
    """
    even = split_layers(config.num_layers, num_stages=num_stages, sizes=sizes)
    if sizes is not None or num_stages == 1:
        return even
    head_in_layers = config.vocab_size * config.hidden_size / _layer_weights(config)
    fair = (config.num_layers + head_in_layers) / num_stages
    num_last = min(max(1, round(fair - head_in_layers)), len(even[-1]))
    before = split_layers(config.num_layers - num_last, num_stages=num_stages - 1)
    bounds = accumulate(chain([0], map(len, before), [num_last]))
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def _layer_weights(config: ModelConfig) -> float:
    """Weights that one token needs of a layer, on average over the layers."""
    hidden, heads = config.hidden_size, 2 * (config.num_query_heads + config.num_kv_heads)
    total = 0
    for layer in range(config.num_layers):
        mixture = config.mixture_of(layer)
        inner = config.intermediate_size
        if mixture is not None:
            inner = mixture.num_per_token * mixture.intermediate_size + mixture.shared_intermediate_size
        total += hidden * (heads * config.head_dim + 3 * inner)
    return total / config.num_layers
