"""The decoder layer that Llama, Qwen3 and Qwen3-MoE share; the config says which parts a layer has.

Legend: T tokens of a step, D hidden size; of this rank: H query heads, K key/value heads; d size of a head.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers.attention import Attention
from parallel_runtime.layers.embedding import ParallelHead, VocabParallelEmbedding
from parallel_runtime.layers.expert_groups import ExpertGroups
from parallel_runtime.layers.experts import Experts, Router
from parallel_runtime.layers.feed_forward import GatedFeedForward
from parallel_runtime.layers.fused import ResidualSum
from parallel_runtime.layers.linear import QkvParallelLinear, RowParallelLinear
from parallel_runtime.layers.moe import MixtureOfExperts, SharedExpert
from parallel_runtime.layers.norm import RMSNorm
from parallel_runtime.layers.packing import pad_rows
from parallel_runtime.layers.rotary import RotaryAngles, rotate
from parallel_runtime.models.config import MixtureConfig, ModelConfig
from parallel_runtime.models.weights import Weights, under
from parallel_runtime.topology.shards import Uneven

__all__ = ["DecoderLayer", "ModelParts", "SelfAttention", "Stream"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """Makes the parts of one model, all on the same groups, in the same dtype.

    Attributes:
        config: Of the whole model.
        tp: Group that the layers are split over.
        experts: Groups that the experts are split over.
        dtype: Of the parameters.
        device: Of the parameters.
        uneven: Whether shards may differ in size.
        residual_sum: What all layers end their row-parallel products with.

    Raises:
        ArgumentError: The model has experts and there are no groups for them, or these are about another ``tp``.
    """

    config: ModelConfig
    tp: GroupCoordinator
    experts: ExpertGroups | None
    dtype: torch.dtype
    device: torch.device | None
    uneven: Uneven
    residual_sum: ResidualSum

    def __post_init__(self) -> None:
        if self.config.mixture is not None and self.experts is None:
            raise ArgumentError("this model has experts; say where: experts=ExpertGroups(tp=ctx.tp, ep=ctx.ep, etp=ctx.etp)")
        if self.experts is not None and self.experts.tp.ranks != self.tp.ranks:
            raise ArgumentError(f"experts.tp has ranks {self.experts.tp.ranks}, tp has {self.tp.ranks}; both are one group")

    def norm(self, size: int | None = None) -> RMSNorm:
        """A normalisation of the hidden size, or of ``size``."""
        config = self.config
        return RMSNorm(size or config.hidden_size, eps=config.rms_norm_eps, dtype=self.dtype, device=self.device)

    def embedding(self) -> VocabParallelEmbedding:
        """The embedding."""
        config = self.config
        return VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, tp=self.tp, uneven=self.uneven, dtype=self.dtype, device=self.device
        )

    def head(self, embedding: VocabParallelEmbedding | None) -> ParallelHead:
        """The head, tied to ``embedding`` where the config wants it and this stage has one."""
        config = self.config
        head = ParallelHead(
            config.vocab_size, config.hidden_size, tp=self.tp, uneven=self.uneven, dtype=self.dtype, device=self.device
        )
        if config.tie_word_embeddings and embedding is not None:
            head.tie(embedding)
        return head

    def qkv(self) -> QkvParallelLinear:
        """The query, key and value projections of one layer."""
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

    def attention_output(self, qkv: QkvParallelLinear) -> RowParallelLinear:
        """The projection behind the attention, cut by the query heads of ``qkv``."""
        query, bias = qkv.pieces[0], self.config.attention_output_bias
        return RowParallelLinear(
            query.size, self.config.hidden_size, tp=self.tp, bias=bias, shards=query.shards, dtype=self.dtype, device=self.device
        )

    def feed_forward(self, intermediate_size: int, *, bias: bool) -> GatedFeedForward:
        """A feed-forward part over ``tp``."""
        return GatedFeedForward(
            self.config.hidden_size,
            intermediate_size,
            tp=self.tp,
            bias=bias,
            uneven=self.uneven,
            dtype=self.dtype,
            device=self.device,
        )

    def mixture(self, mixture: MixtureConfig) -> MixtureOfExperts:
        """The router, the experts and the shared expert of one layer."""
        assert self.experts is not None
        hidden, shared = self.config.hidden_size, mixture.shared_intermediate_size
        router = Router(
            hidden,
            mixture.num_experts,
            num_per_token=mixture.num_per_token,
            normalize=mixture.normalize,
            dtype=self.dtype,
            device=self.device,
        )
        experts = Experts(
            hidden,
            mixture.num_experts,
            intermediate_size=mixture.intermediate_size,
            ep=self.experts.ep,
            etp=self.experts.etp,
            uneven=self.uneven,
            dtype=self.dtype,
            device=self.device,
        )
        gate_size = hidden if mixture.shared_gate else None
        for_all = SharedExpert(self.feed_forward(shared, bias=False), gate_size=gate_size) if shared else None
        return MixtureOfExperts(router, experts, groups=self.experts, shared=for_all)


@final
class Stream(NamedTuple):
    """What flows from layer to layer; equal on every member.

    Attributes:
        hidden: ``(T, D)``, the residual stream.
        normed: Its norm, as the next part wants it.
    """

    hidden: Tensor
    normed: Tensor


@final
class SelfAttention(nn.Module):
    """Attention of one layer: projections around an owner of the KV cache.

    Args:
        parts: Makes the projections and norms.
    """

    def __init__(self, parts: ModelParts) -> None:
        super().__init__()
        self._config = config = parts.config
        self.qkv_proj = parts.qkv()
        self.o_proj = parts.attention_output(self.qkv_proj)
        self.q_norm = parts.norm(config.head_dim) if config.qk_norm else None
        self.k_norm = parts.norm(config.head_dim) if config.qk_norm else None
        self.num_query_heads = len(self.qkv_proj.heads.query)
        self.num_kv_heads = len(self.qkv_proj.heads.kv)

    def forward(self, x_TD: Tensor, angles: RotaryAngles, attention: Attention, index: int) -> Tensor:
        """Attend, up to the projection behind the attention.

        Args:
            x_TD: ``(T, D)``, equal on every member; rows beyond those that ``angles`` has are padding.
            angles: Of the tokens' positions.
            attention: The step; it sees no padding.
            index: Position of the layer in its stage.

        Returns:
            ``(T, H * d)``, what ``o_proj`` is applied to; as many rows as ``x_TD``.
        """
        T, H, K, d = angles.cos.shape[0], self.num_query_heads, self.num_kv_heads, self._config.head_dim
        heads = self.qkv_proj(x_TD).view(-1, H + 2 * K, d)
        num_padding = x_TD.shape[0] - T
        if num_padding:
            heads = heads[:T]
        turning, v_TKd = torch.split(heads, [H + K, K], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            turning = torch.cat((self.q_norm(turning[:, :H]), self.k_norm(turning[:, H:])), dim=1)
        q_THd, k_TKd = torch.split(rotate(turning, angles), [H, K], dim=1)
        out = attention.attend(index, q_THd, k_TKd, v_TKd).reshape(T, H * d)
        return pad_rows(out, num_padding) if num_padding else out

    def load(self, weights: Weights) -> None:
        """Read this rank's shard.

        Args:
            weights: Those of the layer's ``self_attn``.
        """
        config, D = self._config, self._config.hidden_size
        query, kv = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes = {"q_proj": (query, D), "k_proj": (kv, D), "v_proj": (kv, D)}
        self.qkv_proj.load(*weights.all(shapes, bias=config.attention_bias))
        self.o_proj.load(*weights.one("o_proj", (D, query), bias=config.attention_output_bias))
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                norm.load(weights.tensor(f"{name}.weight", (config.head_dim,)))

    def full_state(self) -> dict[str, Tensor]:
        """The full parameters, equal on every member.

        Collective: one all_gatherv for each split parameter; all members, same order.
        """
        state = self.qkv_proj.full_state() | under("o_proj.", self.o_proj.full_state())
        for name, norm in (("q_norm.", self.q_norm), ("k_norm.", self.k_norm)):
            if norm is not None:
                state |= under(name, norm.full_state())
        return state


@final
class DecoderLayer(nn.Module):
    """Attention and a feed-forward part, or a mixture of experts, each behind a norm and beside a residual.

    Args:
        parts: Makes everything in it.
        layer: Its number in the whole model, which decides whether it has experts.

    Attributes:
        self_attn: The attention.
        mlp: The feed-forward part or the mixture.
    """

    def __init__(self, parts: ModelParts, layer: int) -> None:
        super().__init__()
        self._config = config = parts.config
        self._mixture = mixture = config.mixture_of(layer)
        self._residual_sum = parts.residual_sum
        self.input_layernorm = parts.norm()
        self.self_attn = SelfAttention(parts)
        self.post_attention_layernorm = parts.norm()
        self.mlp: GatedFeedForward | MixtureOfExperts = (
            parts.feed_forward(config.intermediate_size, bias=config.mlp_bias) if mixture is None else parts.mixture(mixture)
        )

    def forward(self, stream: Stream, angles: RotaryAngles, attention: Attention, index: int, norm: RMSNorm | None) -> Stream:
        """Apply the layer.

        Args:
            stream: Its hidden states, and their norm by ``input_layernorm``.
            angles: Of the tokens' positions.
            attention: The step.
            index: Position of the layer in its stage.
            norm: What follows the layer: the norm of the next one or of the model; ``None`` at the end of a stage.

        Returns:
            The hidden states behind it, and their norm by ``norm``.

        Collective: two sums of the result, see ``ResidualSum``, and what ``MixtureOfExperts`` adds; all members, same order.
        """
        attended = self.self_attn(stream.normed, angles, attention, index)
        add = self._residual_sum
        hidden_TD, normed_TD = add(self.self_attn.o_proj, attended, stream.hidden, self.post_attention_layernorm)
        if isinstance(self.mlp, GatedFeedForward):
            return Stream(*add(self.mlp.down_proj, self.mlp.inner(normed_TD), hidden_TD, norm))
        hidden_TD = hidden_TD + self.mlp(normed_TD)
        return Stream(hidden_TD, hidden_TD if norm is None else norm(hidden_TD))

    def load(self, weights: Weights) -> None:
        """Read this rank's shard: of the experts only its own ones are looked at.

        Args:
            weights: Those of the layer.
        """
        D = self._config.hidden_size
        self.input_layernorm.load(weights.tensor("input_layernorm.weight", (D,)))
        self.post_attention_layernorm.load(weights.tensor("post_attention_layernorm.weight", (D,)))
        self.self_attn.load(weights.below("self_attn."))
        if isinstance(self.mlp, MixtureOfExperts):
            assert self._mixture is not None
            _load_mixture(self.mlp, self._mixture, weights.below("mlp."))
        else:
            _load_feed_forward(self.mlp, self._config.intermediate_size, weights.below("mlp."), bias=self._config.mlp_bias)

    def full_state(self) -> dict[str, Tensor]:
        """The full parameters, equal on every member, under the names of ``transformers``.

        Collective: one all_gatherv for each split parameter, and those of ``Experts.full_state``; all members, same order.
        """
        mlp = _feed_forward_state(self.mlp) if isinstance(self.mlp, GatedFeedForward) else _mixture_state(self.mlp)
        return (
            under("input_layernorm.", self.input_layernorm.full_state())
            | under("self_attn.", self.self_attn.full_state())
            | under("post_attention_layernorm.", self.post_attention_layernorm.full_state())
            | under("mlp.", mlp)
        )


def _load_feed_forward(ffn: GatedFeedForward, size: int, weights: Weights, *, bias: bool) -> None:
    hidden = ffn.down_proj.weight.shape[0]
    ffn.gate_up_proj.load(*weights.all(dict.fromkeys(("gate_proj", "up_proj"), (size, hidden)), bias=bias))
    ffn.down_proj.load(*weights.one("down_proj", (hidden, size), bias=bias))


def _load_mixture(moe: MixtureOfExperts, mixture: MixtureConfig, weights: Weights) -> None:
    hidden, size = moe.router.weight.shape[1], mixture.intermediate_size
    moe.router.load(weights.tensor("gate.weight", (mixture.num_experts, hidden)))
    sources = []
    for expert in moe.experts.own:
        own = weights.below(f"experts.{expert}.")
        gate, up = (own.tensor(f"{name}.weight", (size, hidden)) for name in ("gate_proj", "up_proj"))
        sources.append((gate, up, own.tensor("down_proj.weight", (hidden, size))))
    moe.experts.load(sources)
    if moe.shared is not None:
        shared = weights.below("shared_expert.")
        _load_feed_forward(moe.shared.ffn, mixture.shared_intermediate_size, shared, bias=False)
        if mixture.shared_gate:
            moe.shared.load_gate(weights.tensor("shared_expert_gate.weight", (1, hidden)))


def _feed_forward_state(ffn: GatedFeedForward) -> dict[str, Tensor]:
    return ffn.gate_up_proj.full_state() | under("down_proj.", ffn.down_proj.full_state())


def _mixture_state(moe: MixtureOfExperts) -> dict[str, Tensor]:
    state = under("gate.", moe.router.full_state()) | under("experts.", moe.experts.full_state())
    if moe.shared is not None:
        state |= under("shared_expert.", _feed_forward_state(moe.shared.ffn))
        if moe.shared.gate is not None:
            state["shared_expert_gate.weight"] = moe.shared.gate.detach().clone()
    return state
