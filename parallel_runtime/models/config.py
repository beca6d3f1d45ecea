"""What a decoder model looks like, whichever file it came from."""

from dataclasses import dataclass
from math import isfinite
from typing import final

from parallel_runtime.config import ModelShape
from parallel_runtime.errors import ConfigError

__all__ = ["MixtureConfig", "ModelConfig"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """The experts of a model's sparse layers.

    Attributes:
        num_experts: E, experts of one layer.
        num_per_token: k, experts that each token visits.
        intermediate_size: Width of one expert.
        normalize: Whether the weights of a token's experts are scaled to add up to 1.
        shared_intermediate_size: Width of the expert that every token visits; 0 for none.
        shared_gate: Whether a gate scales that expert's answer.
        dense_layers: Layers that have an ordinary feed-forward part instead.

    Raises:
        ConfigError: A size is not positive, or a token visits more experts than there are.
    """

    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalize: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_per_token", "intermediate_size"):
            if (size := getattr(self, name)) < 1:
                raise ConfigError(f"{name}={size}; it must be at least 1")
        if self.num_per_token > self.num_experts:
            raise ConfigError(f"num_per_token={self.num_per_token} is more than the {self.num_experts} experts of a layer")
        if self.shared_intermediate_size < 0:
            raise ConfigError(f"shared_intermediate_size={self.shared_intermediate_size}; it must be 0 or more")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder model: Llama, Qwen3, Qwen3-MoE and their relatives.

    Attributes:
        vocab_size: V, rows of the embedding.
        hidden_size: D.
        intermediate_size: F, width of the feed-forward part.
        num_layers: Decoder layers of the whole model.
        num_query_heads: Query heads of the whole model, a multiple of ``num_kv_heads``.
        num_kv_heads: Key/value heads of the whole model.
        head_dim: Size of a head, even.
        rms_norm_eps: Added to the mean square before its root.
        rope_theta: Base of the rotary frequencies.
        rope_factors: Divisor of each of the ``head_dim / 2`` rotary frequencies, or ``None`` for none (Llama 3.1 has them).
        max_positions: Longest sequence the model was made for.
        tie_word_embeddings: Whether the head is the embedding.
        attention_bias: Whether the query, key and value projections have a bias.
        attention_output_bias: Whether the projection behind the attention has one.
        qk_norm: Whether every query head and key head is normalised, with weights that all heads share.
        mlp_bias: Whether the three feed-forward projections have a bias.
        bos_id: Begin-of-sequence token, where there is one.
        eos_ids: Tokens that end a text.
        mixture: The experts, or ``None`` for a dense model.

    Raises:
        ConfigError: A size is not positive, two of them do not fit, or a number is not finite.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_factors: tuple[float, ...] | None = None
    max_positions: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    qk_norm: bool = False
    mlp_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    mixture: MixtureConfig | None = None

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_query_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        )
        for name in sizes:
            if (size := getattr(self, name)) < 1:
                raise ConfigError(f"{name}={size}; it must be at least 1")
        if not (isfinite(self.rope_theta) and self.rope_theta > 0):
            raise ConfigError(f"rope_theta={self.rope_theta}; it must be a finite number above 0")
        if not (isfinite(self.rms_norm_eps) and self.rms_norm_eps >= 0):
            raise ConfigError(f"rms_norm_eps={self.rms_norm_eps}; it must be a finite number of at least 0")
        if self.num_query_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_query_heads={self.num_query_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "every key/value head serves equally many query heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd; rotary positions turn pairs")
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise ConfigError(
                f"{len(self.rope_factors)} rope_factors for head_dim={self.head_dim}; expected {self.head_dim // 2}"
            )
        if not all(isfinite(factor) and factor > 0 for factor in self.rope_factors or ()):
            raise ConfigError(f"rope_factors={self.rope_factors}; each must be a finite number above 0")

    def mixture_of(self, layer: int) -> MixtureConfig | None:
        """The experts of one layer, or ``None`` where it has an ordinary feed-forward part.

        Args:
            layer: Number in the whole model.
        """
        return None if self.mixture is None or layer in self.mixture.dense_layers else self.mixture

    @property
    def shape(self) -> ModelShape:
        """The sizes that ``ParallelConfig.check_model`` looks at."""
        return ModelShape(
            num_layers=self.num_layers,
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size if self.mixture is None else self.mixture.intermediate_size,
            num_experts=0 if self.mixture is None else self.mixture.num_experts,
        )
