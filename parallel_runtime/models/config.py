"""What a Llama-family model looks like, read from any checkpoint."""

import math
from dataclasses import dataclass
from typing import final

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from parallel_runtime.config import ModelShape
from parallel_runtime.errors import CheckpointError, ConfigError

__all__ = ["LlamaConfig", "llama_config_from_hf"]

_MODEL_TYPES = ("llama", "mistral")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes and switches of a Llama-family model.

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
        attention_bias: Whether the four attention projections have a bias.
        mlp_bias: Whether the three feed-forward projections have a bias.
        bos_id: Begin-of-sequence token, where there is one.
        eos_ids: Tokens that end a text.

    Raises:
        ConfigError: A size is not positive, or two of them do not fit.
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
    mlp_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

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

    @property
    def shape(self) -> ModelShape:
        """The sizes that ``ParallelConfig.check_model`` looks at."""
        return ModelShape(
            num_layers=self.num_layers,
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
        )


def llama_config_from_hf(raw: object, *, where: str) -> LlamaConfig:
    """Read the ``config.json`` of a Llama-family model.

    Args:
        raw: The parsed file.
        where: Its path, for messages.

    Raises:
        CheckpointError: A key is missing or wrong, the sizes do not fit, or the model needs what is not implemented here.
    """
    try:
        hf = _HfConfig.model_validate(raw)
    except ValidationError as exc:
        faults = "; ".join(f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}" for error in exc.errors())
        raise CheckpointError(f"{where}: not the configuration of a Llama-family model: {faults}") from exc
    if (reason := hf.unsupported()) is not None:
        raise CheckpointError(f"{where}: {reason}, which is not implemented")
    try:
        return hf.llama()
    except ConfigError as exc:
        raise CheckpointError(f"{where}: {exc}") from exc


class _HfRope(BaseModel):
    rope_type: str = Field("default", validation_alias=AliasChoices("rope_type", "type"))
    rope_theta: float | None = None
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def factors(self, theta: float, head_dim: int) -> tuple[float, ...] | None:
        """Llama 3.1's rule: long waves are slowed by ``factor``, short ones kept, those between are blended."""
        if self.rope_type == "default":
            return None
        return tuple(self._divisor(theta ** (dim / head_dim)) for dim in range(0, head_dim, 2))

    def _divisor(self, radius: float) -> float:
        turns = self.original_max_position_embeddings / (2 * math.pi * radius)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        return 1 / (blend + (1 - blend) / self.factor)


class _HfConfig(BaseModel):
    """The keys of a ``config.json`` that matter here, with the defaults that ``transformers`` gives them."""

    model_config = ConfigDict(protected_namespaces=())

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_parameters: _HfRope | None = None
    rope_scaling: _HfRope | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    quantization_config: dict[str, object] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @property
    def rope(self) -> _HfRope:
        return self.rope_parameters or self.rope_scaling or _HfRope()

    def unsupported(self) -> str | None:
        """The first thing this model needs that is not implemented here."""
        if self.model_type not in _MODEL_TYPES:
            return f"model_type is {self.model_type!r} (known: {', '.join(_MODEL_TYPES)})"
        if self.sliding_window is not None:
            return f"sliding_window is {self.sliding_window}"
        if self.quantization_config is not None:
            return f"quantization_config is set (method {self.quantization_config.get('quant_method')!r})"
        if self.hidden_act != "silu":
            return f"hidden_act is {self.hidden_act!r} (known: silu)"
        if self.rope.rope_type not in ("default", "llama3"):
            return f"the rope type is {self.rope.rope_type!r} (known: default, llama3)"
        if self.rope.partial_rotary_factor != 1.0:
            return f"partial_rotary_factor is {self.rope.partial_rotary_factor}"
        return None

    def llama(self) -> LlamaConfig:
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        theta = self.rope.rope_theta or self.rope_theta
        eos = self.eos_token_id
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_query_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=theta,
            rope_factors=self.rope.factors(theta, head_dim),
            max_positions=self.max_position_embeddings,
            tie_word_embeddings=self.tie_word_embeddings,
            attention_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            bos_id=self.bos_token_id,
            eos_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        )
