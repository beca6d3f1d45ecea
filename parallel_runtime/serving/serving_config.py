"""What a user sets about serving."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from parallel_runtime.config.base import FrozenModel
from parallel_runtime.topology.shards import Uneven

__all__ = ["ServingConfig"]


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list | range) else value


class ServingConfig(FrozenModel):
    """How a model is served; the same on every rank.

    Attributes:
        dtype: Of weights, hidden states and KV cache.
        stage_layers: Layers of each pipeline stage; ``None`` gives the last one fewer, as far as its head takes its time.
        uneven: ``"refuse"`` wants heads, vocabulary and intermediate size cut into equal parts, and starts nothing else.
        num_microbatches: Batches under way at once in each replica; ``None`` is one per pipeline stage, which keeps every stage
            busy where each has cores of its own. 1 reads the weights least often.
        page_size: Tokens in one block of KV cache.
        kv_cache_tokens: Tokens of KV cache of each replica; ``None`` takes what all running requests could need, within 30%
            of the free memory, which the ranks share.
        max_batch_tokens: Tokens computed in one step; a longer prompt is computed in several.
        max_batch_requests: Requests that run at once in one replica.
        max_waiting: Requests that may wait for each replica; one more is refused at once.
        max_request_tokens: Prompt plus new tokens of one request; ``None`` takes the model's context length.
        prefix_reuse: Whether full blocks of KV cache are kept for later prompts that begin alike.
        decode_graphs: Whether steps of one new token per request are captured as device graphs when a worker starts, and
            replayed: on CUDA, for models without experts, whose sequences are not cut. Costs time at the start, saves it later.
        count_operations: Whether every rank counts calls, bytes, seconds and waits of its groups' operations, for ``/metrics``.
        balance: How requests are spread over the data-parallel ranks of all replicas.
        seed: Base of the random streams of requests without a seed of their own; ``None`` draws one.

    Raises:
        ConfigError: A value breaks a rule.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    stage_layers: Annotated[tuple[int, ...] | None, BeforeValidator(_as_tuple)] = None
    uneven: Uneven = "allow"
    num_microbatches: int | None = Field(default=None, ge=1)
    page_size: int = Field(default=16, ge=1)
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    max_batch_tokens: int = Field(default=512, ge=1)
    max_batch_requests: int = Field(default=32, ge=1)
    max_waiting: int = Field(default=1024, ge=1)
    max_request_tokens: int | None = Field(default=None, ge=2)
    prefix_reuse: bool = True
    decode_graphs: bool = True
    count_operations: bool = False
    balance: Literal["round_robin", "least_requests", "least_tokens", "prefix_affinity"] = "least_requests"
    seed: int | None = Field(default=None, ge=0, lt=2**63)
