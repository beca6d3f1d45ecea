"""Reading the ``config.json`` of a model directory."""

import math

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from parallel_runtime.errors import CheckpointError, ConfigError
from parallel_runtime.models.config import MixtureConfig, ModelConfig

__all__ = ["model_config_from_hf"]

_MOST = 2**16
"""No model comes near; more layers or larger heads than this are a damaged file."""

_MODEL_TYPES = ("llama", "mistral", "qwen3", "qwen2_moe", "qwen3_moe")


def model_config_from_hf(raw: object, *, where: str) -> ModelConfig:
    """Read a ``config.json``.

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
        raise CheckpointError(f"{where}: not the configuration of a model that is known here: {faults}") from exc
    if (reason := hf.unsupported()) is not None:
        raise CheckpointError(f"{where}: {reason}, which is not implemented")
    if (reason := hf.contradiction()) is not None:
        raise CheckpointError(f"{where}: {reason}")
    try:
        return hf.model()
    except ConfigError as exc:
        raise CheckpointError(f"{where}: {exc}") from exc


class _HfRope(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)

    rope_type: str = Field("default", validation_alias=AliasChoices("rope_type", "type"))
    rope_theta: float | None = Field(None, gt=0)
    partial_rotary_factor: float = 1.0
    factor: float = Field(1.0, gt=0)
    low_freq_factor: float = Field(1.0, gt=0)
    high_freq_factor: float = Field(4.0, gt=0)
    original_max_position_embeddings: int = Field(8192, ge=1)

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

    model_config = ConfigDict(protected_namespaces=(), allow_inf_nan=False)

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int = Field(le=_MOST)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = None
    head_dim: int | None = Field(None, ge=1, le=_MOST)
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = Field(10000.0, gt=0)
    rope_parameters: _HfRope | None = None
    rope_scaling: _HfRope | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    qkv_bias: bool = True
    num_experts: int = Field(0, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: int = 1
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    shared_expert_intermediate_size: int = 0
    decoder_sparse_step: int = Field(1, ge=1)
    mlp_only_layers: list[int] | None = None
    quantization_config: dict[str, object] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @property
    def _slides(self) -> bool:
        """Qwen names a window that nothing uses unless a switch says so; others use the window they name."""
        return self.model_type in ("llama", "mistral") if self.use_sliding_window is None else self.use_sliding_window

    @property
    def rope(self) -> _HfRope:
        return next((rope for rope in self._ropes.values()), _HfRope())

    @property
    def _ropes(self) -> dict[str, _HfRope]:
        """What was given, the newer key first."""
        given = {"rope_parameters": self.rope_parameters, "rope_scaling": self.rope_scaling}
        return {name: rope for name, rope in given.items() if rope is not None}

    @property
    def _thetas(self) -> dict[str, float]:
        """Every value that was given for the base, by its key."""
        top = {"rope_theta": self.rope_theta} if "rope_theta" in self.model_fields_set else {}
        return {f"{name}.rope_theta": rope.rope_theta for name, rope in self._ropes.items() if rope.rope_theta is not None} | top

    def contradiction(self) -> str | None:
        """Keys that say different things about the rotary positions."""
        if len(set(self._thetas.values())) > 1:
            return "different bases: " + ", ".join(f"{name}={theta}" for name, theta in self._thetas.items())
        ropes = {name: rope.model_dump(exclude={"rope_theta"}) for name, rope in self._ropes.items()}
        if len(ropes) == 2 and ropes["rope_parameters"] != ropes["rope_scaling"]:
            return "rope_parameters and rope_scaling contradict each other; keep the one that is right"
        if self.rope.rope_type == "llama3" and not self.rope.low_freq_factor < self.rope.high_freq_factor:
            return f"low_freq_factor={self.rope.low_freq_factor} is not below high_freq_factor={self.rope.high_freq_factor}"
        return None

    def unsupported(self) -> str | None:
        """The first thing this model needs that is not implemented here."""
        if self.model_type not in _MODEL_TYPES:
            return f"model_type is {self.model_type!r} (known: {', '.join(_MODEL_TYPES)})"
        if self.sliding_window is not None and self._slides:
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

    def model(self) -> ModelConfig:
        usual = 128 if self.model_type == "qwen3" else self.hidden_size // self.num_attention_heads
        head_dim = usual if self.head_dim is None else self.head_dim
        theta = next(iter(self._thetas.values()), self.rope_theta)
        eos = self.eos_token_id
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_query_heads=self.num_attention_heads,
            num_kv_heads=self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=theta,
            rope_factors=self.rope.factors(theta, head_dim),
            max_positions=self.max_position_embeddings,
            tie_word_embeddings=self.tie_word_embeddings,
            attention_bias=self.qkv_bias if self.model_type == "qwen2_moe" else self.attention_bias,
            attention_output_bias=self.attention_bias and self.model_type != "qwen2_moe",
            qk_norm=self.model_type in ("qwen3", "qwen3_moe"),
            mlp_bias=self.mlp_bias,
            bos_id=self.bos_token_id,
            eos_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            mixture=self._mixture() if self.model_type in ("qwen2_moe", "qwen3_moe") else None,
        )

    def _mixture(self) -> MixtureConfig | None:
        named = frozenset(self.mlp_only_layers or ())
        dense = {layer for layer in range(self.num_hidden_layers) if layer in named or (layer + 1) % self.decoder_sparse_step}
        if self.num_experts == 0 or len(dense) == self.num_hidden_layers:
            return None
        has_shared = self.model_type == "qwen2_moe"
        return MixtureConfig(
            num_experts=self.num_experts,
            num_per_token=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            normalize=self.norm_topk_prob,
            shared_intermediate_size=self.shared_expert_intermediate_size if has_shared else 0,
            shared_gate=has_shared,
            dense_layers=frozenset(dense),
        )
