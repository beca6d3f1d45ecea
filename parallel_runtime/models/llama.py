"""The Llama family: decoder layers split over a tensor-parallel group, and a stage of them for pipelines.

Legend: T tokens of a step, S rows whose logits are wanted, D hidden size, V vocabulary; of this rank: H query heads, K key/value
heads, F part of the intermediate size; d size of a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers.attention import Attention
from parallel_runtime.layers.embedding import ParallelHead, VocabParallelEmbedding
from parallel_runtime.layers.linear import GateUpParallelLinear, QkvParallelLinear, RowParallelLinear
from parallel_runtime.layers.norm import RMSNorm
from parallel_runtime.layers.rotary import RotaryAngles, RotaryPositions, rotate
from parallel_runtime.layers.sources import TensorSource
from parallel_runtime.models.checkpoint import Checkpoint
from parallel_runtime.models.config import LlamaConfig
from parallel_runtime.topology.shards import Uneven

__all__ = ["LlamaForCausalLM", "load_llama"]


@final
class LlamaForCausalLM(nn.Module):
    """One rank's part of a Llama-family model: a shard of every layer of one pipeline stage. Uninitialised until ``load``.

    Args:
        config: Of the whole model.
        tp: Group the layers are split over. Borrowed.
        layers: Consecutive layers of this stage; all of them by default. The stage of layer 0 has the embedding, that of the last
            layer the final norm and the head.
        dtype: Of parameters and hidden states, float32 or bfloat16.
        device: Of the parameters.
        uneven: ``"refuse"`` wants shards of equal size everywhere.

    Attributes:
        config: Of the whole model.
        layers: Of this stage.
        is_first_stage: Whether it takes token ids.
        is_last_stage: Whether it gives logits.
        dtype: Of parameters and hidden states.
        num_query_heads: H.
        num_kv_heads: K, which divides H; what a KV cache of this rank holds.
        head_dim: d.

    Raises:
        ArgumentError: ``layers`` is no range of the model's layers.
        ConfigError: The model cannot be split that far, or not evenly where that is wanted.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        tp: GroupCoordinator,
        layers: range | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        uneven: Uneven = "allow",
    ) -> None:
        super().__init__()
        self.config = config
        self.layers = range(config.num_layers) if layers is None else layers
        if self.layers.step != 1 or not 0 <= self.layers.start < self.layers.stop <= config.num_layers:
            raise ArgumentError(f"layers={self.layers} is no part of the model's {config.num_layers} layers; see split_layers")
        self.dtype = dtype
        self.is_first_stage = self.layers.start == 0
        self.is_last_stage = self.layers.stop == config.num_layers
        parts = _Parts(config=config, tp=tp, dtype=dtype, device=device, uneven=uneven)
        self.embed_tokens = parts.embedding() if self.is_first_stage else None
        self.decoder = nn.ModuleList(_DecoderLayer(parts) for _ in self.layers)
        self.norm = parts.norm() if self.is_last_stage else None
        self.lm_head = parts.head(self.embed_tokens) if self.is_last_stage else None
        self._positions = RotaryPositions(config.head_dim, theta=config.rope_theta, factors=config.rope_factors, device=device)
        heads = self._layer(0).self_attn.qkv_proj.heads
        self.num_query_heads, self.num_kv_heads, self.head_dim = len(heads.query), len(heads.kv), config.head_dim

    def forward(self, inputs: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Run the layers of this stage on one step's tokens, those of all its sequences in one row.

        Args:
            inputs: ``ids_T``, int64, on the first stage; the ``hidden_TD`` of the stage before elsewhere. Equal on every member.
            positions_T: Position of each token in its sequence, int64.
            attention: The step, bound to a KV cache with this stage's layers and this rank's heads.

        Returns:
            ``hidden_TD``; on the last stage normalised, ready for ``logits`` or ``greedy``.

        Raises:
            ArgumentError: The number of positions is not that of the inputs, or an id is outside the vocabulary.

        Collective: two all_reduces of ``(T, D)`` for each layer, one more on the first stage; all members, same order.
        """
        if positions_T.shape != inputs.shape[:1]:
            raise ArgumentError(
                f"{tuple(positions_T.shape)} positions for inputs of shape {tuple(inputs.shape)}; one per token is needed"
            )
        hidden_TD = inputs if self.embed_tokens is None else self.embed_tokens(inputs)
        angles = self._positions.angles(positions_T, self.dtype)
        for index in range(len(self.layers)):
            hidden_TD = self._layer(index)(hidden_TD, angles, attention, index)
        return hidden_TD if self.norm is None else self.norm(hidden_TD)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Logits of the whole vocabulary; last stage only.

        Args:
            hidden_SD: Rows of what ``forward`` returned; pick those that are needed first.

        Returns:
            ``(S, V)`` of the model's dtype, equal on every member.

        Raises:
            ArgumentError: This is not the last stage.

        Collective: one all_gatherv of the local logits; all members, same order.
        """
        logits_SV: Tensor = self._head()(hidden_SD)
        return logits_SV

    def greedy(self, hidden_SD: Tensor) -> Tensor:
        """The most likely token of each row, among equals the lowest id; last stage only.

        Args:
            hidden_SD: Rows of what ``forward`` returned; pick those that are needed first.

        Returns:
            ``(S,)`` int64, equal on every member.

        Raises:
            ArgumentError: This is not the last stage.

        Collective: one all_gather of 16 bytes for each row; all members, same order.
        """
        return self._head().greedy(hidden_SD)

    def load(self, checkpoint: Checkpoint) -> None:
        """Read this rank's shard of every parameter, and nothing else.

        Args:
            checkpoint: Open; its config is this model's.

        Raises:
            CheckpointError: A tensor is missing, has the wrong shape or cannot be read.
        """
        weights = _Weights(checkpoint, "model.")
        if self.embed_tokens is not None:
            self.embed_tokens.load(weights.tensor("embed_tokens.weight", self._vocabulary_shape))
        for index, layer in enumerate(self.layers):
            self._layer(index).load(_Weights(checkpoint, f"model.layers.{layer}."))
        if self.norm is not None:
            self.norm.load(weights.tensor("norm.weight", (self.config.hidden_size,)))
        if self.lm_head is not None and not (self.config.tie_word_embeddings and self.is_first_stage):
            name = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
            self.lm_head.load(checkpoint.tensor(name, self._vocabulary_shape))

    def full_state(self) -> dict[str, Tensor]:
        """The full parameters of this stage, equal on every member, under the names of ``transformers``.

        Returns:
            Every parameter once; a tied head is left out.

        Collective: one all_gatherv for each split parameter; all members, same order.
        """
        state: dict[str, Tensor] = {}
        if self.embed_tokens is not None:
            state |= _under("model.embed_tokens.", self.embed_tokens.full_state())
        for index, layer in enumerate(self.layers):
            state |= _under(f"model.layers.{layer}.", self._layer(index).full_state())
        if self.norm is not None:
            state |= _under("model.norm.", self.norm.full_state())
        if self.lm_head is not None and not self.config.tie_word_embeddings:
            state |= _under("lm_head.", self.lm_head.full_state())
        return state

    @property
    def _vocabulary_shape(self) -> tuple[int, int]:
        return self.config.vocab_size, self.config.hidden_size

    def _layer(self, index: int) -> "_DecoderLayer":
        layer = self.decoder[index]
        assert isinstance(layer, _DecoderLayer)
        return layer

    def _head(self) -> ParallelHead:
        if self.lm_head is None:
            raise ArgumentError(
                f"the stage of layers {self.layers.start} to {self.layers.stop - 1} has no head; "
                f"logits come from the stage of layer {self.config.num_layers - 1}"
            )
        return self.lm_head


def load_llama(
    checkpoint: Checkpoint,
    *,
    tp: GroupCoordinator,
    layers: range | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    uneven: Uneven = "allow",
) -> LlamaForCausalLM:
    """Build one rank's part of a model and read its shard of the weights.

    Args:
        checkpoint: Open; may be closed afterwards.
        tp: Group the layers are split over. Borrowed.
        layers: Of this stage, see ``split_layers``; all by default.
        dtype: Weights are converted to it.
        device: Weights are put there.
        uneven: ``"refuse"`` wants shards of equal size everywhere.

    Returns:
        The model, ready for ``forward`` under ``torch.inference_mode``.

    Raises:
        ArgumentError: ``layers`` is no range of the model's layers.
        ConfigError: The model cannot be split that far, or not evenly where that is wanted.
        CheckpointError: A tensor is missing, has the wrong shape or cannot be read.
    """
    model = LlamaForCausalLM(checkpoint.config, tp=tp, layers=layers, dtype=dtype, device=device, uneven=uneven)
    model.load(checkpoint)
    return model


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What every part of a model is made with."""

    config: LlamaConfig
    tp: GroupCoordinator
    dtype: torch.dtype
    device: torch.device | None
    uneven: Uneven

    def norm(self) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps, dtype=self.dtype, device=self.device)

    def embedding(self) -> VocabParallelEmbedding:
        config = self.config
        return VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, tp=self.tp, uneven=self.uneven, dtype=self.dtype, device=self.device
        )

    def head(self, embedding: VocabParallelEmbedding | None) -> ParallelHead:
        config = self.config
        head = ParallelHead(
            config.vocab_size, config.hidden_size, tp=self.tp, uneven=self.uneven, dtype=self.dtype, device=self.device
        )
        if config.tie_word_embeddings and embedding is not None:
            head.tie(embedding)
        return head

    def qkv(self) -> QkvParallelLinear:
        config = self.config
        return QkvParallelLinear(
            config.hidden_size,
            num_query_heads=config.num_query_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            tp=self.tp,
            bias=config.attention_bias,
            uneven=self.uneven,
            dtype=self.dtype,
            device=self.device,
        )

    def gate_up(self) -> GateUpParallelLinear:
        return GateUpParallelLinear(
            self.config.hidden_size,
            self.config.intermediate_size,
            tp=self.tp,
            bias=self.config.mlp_bias,
            uneven=self.uneven,
            dtype=self.dtype,
            device=self.device,
        )

    def rows(self, in_features: int, shards: tuple[range, ...], bias: bool) -> RowParallelLinear:
        return RowParallelLinear(
            in_features, self.config.hidden_size, tp=self.tp, bias=bias, shards=shards, dtype=self.dtype, device=self.device
        )


@final
class _SelfAttention(nn.Module):
    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        config = parts.config
        self.qkv_proj = parts.qkv()
        query = self.qkv_proj.pieces[0]
        self.o_proj = parts.rows(query.size, query.shards, config.attention_bias)
        self.head_dim = config.head_dim
        self.num_query_heads = len(self.qkv_proj.heads.query)
        self.num_kv_heads = len(self.qkv_proj.heads.kv)

    def forward(self, x_TD: Tensor, angles: RotaryAngles, attention: Attention, index: int) -> Tensor:
        T, H, K = x_TD.shape[0], self.num_query_heads, self.num_kv_heads
        heads = self.qkv_proj(x_TD).view(T, H + 2 * K, self.head_dim)
        turned = rotate(heads[:, : H + K], angles)
        out_THd = attention.attend(index, turned[:, :H], turned[:, H:], heads[:, H + K :])
        out_TD: Tensor = self.o_proj(out_THd.reshape(T, H * self.head_dim))
        return out_TD


@final
class _FeedForward(nn.Module):
    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        self.gate_up_proj = parts.gate_up()
        gate = self.gate_up_proj.pieces[0]
        self.down_proj = parts.rows(gate.size, gate.shards, parts.config.mlp_bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate_up_proj(x_TD).chunk(2, dim=-1)
        out_TD: Tensor = self.down_proj(functional.silu(gate_TF) * up_TF)
        return out_TD


@final
class _DecoderLayer(nn.Module):
    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        self.input_layernorm = parts.norm()
        self.self_attn = _SelfAttention(parts)
        self.post_attention_layernorm = parts.norm()
        self.mlp = _FeedForward(parts)
        self._config = parts.config

    def forward(self, hidden_TD: Tensor, angles: RotaryAngles, attention: Attention, index: int) -> Tensor:
        hidden_TD = hidden_TD + self.self_attn(self.input_layernorm(hidden_TD), angles, attention, index)
        mlp_TD: Tensor = self.mlp(self.post_attention_layernorm(hidden_TD))
        return hidden_TD + mlp_TD

    def load(self, weights: "_Weights") -> None:
        config, D = self._config, self._config.hidden_size
        query, kv = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
        for name, norm in (
            ("input_layernorm", self.input_layernorm),
            ("post_attention_layernorm", self.post_attention_layernorm),
        ):
            norm.load(weights.tensor(f"{name}.weight", (D,)))
        qkv = {"self_attn.q_proj": (query, D), "self_attn.k_proj": (kv, D), "self_attn.v_proj": (kv, D)}
        self.self_attn.qkv_proj.load(*weights.all(qkv, bias=config.attention_bias))
        self.self_attn.o_proj.load(*weights.one("self_attn.o_proj", (D, query), bias=config.attention_bias))
        gate_up = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (config.intermediate_size, D))
        self.mlp.gate_up_proj.load(*weights.all(gate_up, bias=config.mlp_bias))
        self.mlp.down_proj.load(*weights.one("mlp.down_proj", (D, config.intermediate_size), bias=config.mlp_bias))

    def full_state(self) -> dict[str, Tensor]:
        return (
            _under("input_layernorm.", self.input_layernorm.full_state())
            | _under("self_attn.", self.self_attn.qkv_proj.full_state())
            | _under("self_attn.o_proj.", self.self_attn.o_proj.full_state())
            | _under("post_attention_layernorm.", self.post_attention_layernorm.full_state())
            | _under("mlp.", self.mlp.gate_up_proj.full_state())
            | _under("mlp.down_proj.", self.mlp.down_proj.full_state())
        )


@final
class _Weights:
    """The tensors of a checkpoint under one prefix, each looked up with the shape that the config asks for."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix

    def tensor(self, name: str, shape: tuple[int, ...]) -> TensorSource:
        return self._checkpoint.tensor(self._prefix + name, shape)

    def one(self, module: str, shape: tuple[int, int], *, bias: bool) -> tuple[TensorSource, TensorSource | None]:
        return self.tensor(f"{module}.weight", shape), self.tensor(f"{module}.bias", shape[:1]) if bias else None

    def all(self, shapes: Mapping[str, tuple[int, int]], *, bias: bool) -> tuple[list[TensorSource], list[TensorSource] | None]:
        weights = [self.tensor(f"{module}.weight", shape) for module, shape in shapes.items()]
        biases = [self.tensor(f"{module}.bias", shape[:1]) for module, shape in shapes.items()] if bias else None
        return weights, biases


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}
