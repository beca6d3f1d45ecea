"""The few numbers of a model that decide which layouts it fits."""

from typing import Annotated

from pydantic import Field

from parallel_runtime.config.base import FrozenModel

__all__ = ["ModelShape"]

_Count = Annotated[int, Field(ge=1)]


class ModelShape(FrozenModel):
    """What a model is cut by.

    Attributes:
        num_layers: Transformer layers.
        num_query_heads: Query heads of one layer.
        num_kv_heads: KV heads of one layer; divides ``num_query_heads``.
        vocab_size: Tokens in the vocabulary.
        hidden_size: Width of the residual stream.
        intermediate_size: Intermediate size of the MLP, or of one expert where there are experts.
        num_experts: Experts of one layer; 0 for a dense model.

    Raises:
        ConfigError: A number is out of range.
    """

    num_layers: _Count
    num_query_heads: _Count
    num_kv_heads: _Count
    vocab_size: _Count
    hidden_size: _Count
    intermediate_size: _Count
    num_experts: Annotated[int, Field(ge=0)] = 0
