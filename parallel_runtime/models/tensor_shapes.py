"""Which tensors a model has, and their shapes, from its configuration alone."""

from collections.abc import Iterator

from parallel_runtime.models.config import MixtureConfig, ModelConfig

__all__ = ["tensor_shapes"]


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Go through the tensors of a model, without a list of them: a damaged configuration may ask for any number.

    Args:
        config: Of the whole model.

    Yields:
        The name that ``transformers`` has for a tensor, and its shape. A tied head is left out.
    """
    D = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, D)
    for layer in range(config.num_layers):
        for name, shape in _layer(config, config.mixture_of(layer)):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (D,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, D)


def _layer(config: ModelConfig, mixture: MixtureConfig | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    D, query, kv = config.hidden_size, config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (D,)
    yield "post_attention_layernorm.weight", (D,)
    for name, rows in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
        yield from _linear(f"self_attn.{name}", rows, D, bias=config.attention_bias)
    yield from _linear("self_attn.o_proj", D, query, bias=config.attention_output_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    if mixture is None:
        yield from _feed_forward("mlp", D, config.intermediate_size, bias=config.mlp_bias)
    else:
        yield from _mixture(mixture, D)


def _mixture(mixture: MixtureConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mlp.gate.weight", (mixture.num_experts, hidden)
    for expert in range(mixture.num_experts):
        yield from _feed_forward(f"mlp.experts.{expert}", hidden, mixture.intermediate_size, bias=False)
    if mixture.shared_intermediate_size:
        yield from _feed_forward("mlp.shared_expert", hidden, mixture.shared_intermediate_size, bias=False)
        if mixture.shared_gate:
            yield "mlp.shared_expert_gate.weight", (1, hidden)


def _feed_forward(name: str, hidden: int, size: int, *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part, rows, columns in (("gate_proj", size, hidden), ("up_proj", size, hidden), ("down_proj", hidden, size)):
        yield from _linear(f"{name}.{part}", rows, columns, bias=bias)


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)
