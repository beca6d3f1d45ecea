"""Decoder models such as Llama, Qwen3 and Qwen3-MoE: one stage of a pipeline, split over this rank's groups.

Legend: T tokens of a step, S rows whose logits are wanted, D hidden size, V vocabulary; of this rank: H query heads, K key/value
heads; d size of a head.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers.attention import Attention
from parallel_runtime.layers.embedding import ParallelHead
from parallel_runtime.layers.expert_groups import ExpertGroups
from parallel_runtime.layers.fused import ResidualSum
from parallel_runtime.layers.packing import PackableLayer, missing_rows, pad_rows
from parallel_runtime.layers.rotary import RotaryAngles, RotaryPositions
from parallel_runtime.models.checkpoint import Checkpoint
from parallel_runtime.models.config import ModelConfig
from parallel_runtime.models.decoder import DecoderLayer, ModelParts, Stream
from parallel_runtime.models.lean import LeanLayers
from parallel_runtime.models.weights import Weights, under
from parallel_runtime.topology.shards import Uneven

__all__ = ["CausalLM", "load_model"]


@final
class CausalLM(nn.Module):
    """One rank's part of a decoder model: a shard of every layer of one pipeline stage. Uninitialised until ``load``.

    Args:
        config: Of the whole model.
        tp: Group the layers are split over. Borrowed.
        experts: Groups the experts are split over; wanted where the model has any. Its ``tp`` is ``tp``.
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
        ArgumentError: ``layers`` is no range of the model's layers, or experts have no groups.
        ConfigError: The model cannot be split that far, or not evenly where that is wanted.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: GroupCoordinator,
        experts: ExpertGroups | None = None,
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
        parts = ModelParts(
            config=config, tp=tp, experts=experts, dtype=dtype, device=device, uneven=uneven, residual_sum=ResidualSum(tp)
        )
        self.embed_tokens = parts.embedding() if self.is_first_stage else None
        self.decoder = nn.ModuleList(DecoderLayer(parts, layer) for layer in self.layers)
        self._has_experts = any(config.mixture_of(layer) is not None for layer in self.layers)  # these would compute padding
        self.norm = parts.norm() if self.is_last_stage else None
        self.lm_head = parts.head(self.embed_tokens) if self.is_last_stage else None
        self._positions = RotaryPositions(config.head_dim, theta=config.rope_theta, factors=config.rope_factors, device=device)
        own = [self._layer(index) for index in range(len(self.layers))]
        self._lean = None if self._has_experts else LeanLayers(own, self.norm, tp)
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

        Collective: two sums of ``(T, D)`` for each layer, one more on the first stage, and what ``MixtureOfExperts`` adds;
            all members, same order. No tokens at all are a step like any other.
        """
        if positions_T.shape != inputs.shape[:1]:
            raise ArgumentError(
                f"{tuple(positions_T.shape)} positions for inputs of shape {tuple(inputs.shape)}; one per token is needed"
            )
        hidden_TD = inputs if self.embed_tokens is None else self.embed_tokens(inputs)
        angles = self._positions.angles(positions_T, self.dtype)
        num_padding = 0 if self._has_experts else missing_rows(hidden_TD, self._layer(0).self_attn.qkv_proj.weight)
        if num_padding:  # once, and not for each product of each layer
            hidden_TD = pad_rows(hidden_TD, num_padding)
        if self._lean is not None and hidden_TD.is_cpu and torch.is_inference_mode_enabled() and not is_dynamo_compiling():
            normed_TD = self._lean(hidden_TD, self._layer(0).input_layernorm(hidden_TD), angles, attention)
        else:
            normed_TD = self._by_modules(hidden_TD, angles, attention)
        return normed_TD[:-num_padding] if num_padding else normed_TD

    def _by_modules(self, hidden_TD: Tensor, angles: RotaryAngles, attention: Attention) -> Tensor:
        """The layers as modules: with gradients, hooks and experts, on any device."""
        stream = Stream(hidden_TD, self._layer(0).input_layernorm(hidden_TD))
        norms = [*(self._layer(index).input_layernorm for index in range(1, len(self.layers))), self.norm]
        for index, norm in enumerate(norms):
            stream = self._layer(index)(stream, angles, attention, index, norm)
        return stream.normed

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

    def load(self, checkpoint: Checkpoint, *, pack: bool = False) -> None:
        """Read this rank's shard of every parameter, and nothing else. Parameters that were packed are packed again.

        Args:
            checkpoint: Open; its config is this model's.
            pack: Pack each layer as soon as it is read, so that its plain form is gone before the next one comes.

        Raises:
            CheckpointError: A tensor is missing, has the wrong shape or cannot be read.
        """
        weights = Weights(checkpoint, "model.")
        if self.embed_tokens is not None:
            self.embed_tokens.load(weights.tensor("embed_tokens.weight", self._vocabulary_shape))
        for index, layer in enumerate(self.layers):
            self._layer(index).load(Weights(checkpoint, f"model.layers.{layer}."))
            if pack:
                _pack(self._layer(index))
        if self.norm is not None:
            self.norm.load(weights.tensor("norm.weight", (self.config.hidden_size,)))
        if self.lm_head is not None:
            self._load_head(self.lm_head, checkpoint)
            if pack:
                self.lm_head.pack()

    def pack(self) -> None:
        """Bring the large weights into the form that the CPU multiplies fastest with, where this machine has one.

        The packed form takes the place of the plain one; a head that is tied to the embedding gets a packed copy of its own.
        Such a model is for inference: ``load`` and ``full_state`` work as before, ``parameters()`` keep their shapes and
        cannot be written.
        """
        _pack(self)

    def unpack(self) -> None:
        """Have plain weights again, to write into them in place or to train; ``pack`` afterwards."""
        for module in self.modules():
            if isinstance(module, PackableLayer):
                module.unpack()
        if self.lm_head is not None and self.embed_tokens is not None and self.config.tie_word_embeddings:
            self.lm_head.tie(self.embed_tokens)

    def full_state(self) -> dict[str, Tensor]:
        """The full parameters of this stage, equal on every member, under the names of ``transformers``.

        Returns:
            Every parameter once; a tied head is left out.

        Collective: one all_gatherv for each split parameter, and those of the experts; all members, same order.
        """
        state: dict[str, Tensor] = {}
        if self.embed_tokens is not None:
            state |= under("model.embed_tokens.", self.embed_tokens.full_state())
        for index, layer in enumerate(self.layers):
            state |= under(f"model.layers.{layer}.", self._layer(index).full_state())
        if self.norm is not None:
            state |= under("model.norm.", self.norm.full_state())
        if self.lm_head is not None and not self.config.tie_word_embeddings:
            state |= under("lm_head.", self.lm_head.full_state())
        return state

    def _load_head(self, head: ParallelHead, checkpoint: Checkpoint) -> None:
        if not self.config.tie_word_embeddings:
            head.load(checkpoint.tensor("lm_head.weight", self._vocabulary_shape))
        elif self.embed_tokens is None:
            head.load(checkpoint.tensor("model.embed_tokens.weight", self._vocabulary_shape))
        else:
            head.tie(self.embed_tokens)

    @property
    def _vocabulary_shape(self) -> tuple[int, int]:
        return self.config.vocab_size, self.config.hidden_size

    def _layer(self, index: int) -> "DecoderLayer":
        layer = self.decoder[index]
        assert isinstance(layer, DecoderLayer)
        return layer

    def _head(self) -> ParallelHead:
        if self.lm_head is None:
            raise ArgumentError(
                f"the stage of layers {self.layers.start} to {self.layers.stop - 1} has no head; "
                f"logits come from the stage of layer {self.config.num_layers - 1}"
            )
        return self.lm_head


def load_model(
    checkpoint: Checkpoint,
    *,
    tp: GroupCoordinator,
    experts: ExpertGroups | None = None,
    layers: range | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    uneven: Uneven = "allow",
    pack: bool = False,
) -> CausalLM:
    """Build one rank's part of a model and read its shard of the weights.

    The shapes of all its tensors are compared before anything is allocated, so that every rank refuses what one must refuse.

    Args:
        checkpoint: Open; may be closed afterwards.
        tp: Group the layers are split over. Borrowed.
        experts: Groups the experts are split over; wanted where the model has any. Its ``tp`` is ``tp``.
        layers: Of this stage, see ``split_layers``; all by default.
        dtype: Weights are converted to it.
        device: Weights are put there.
        uneven: ``"refuse"`` wants shards of equal size everywhere.
        pack: Hold weights as ``CausalLM.pack`` does and ask for no gradients: for a model that serves and is not trained.

    Returns:
        The model, ready for ``forward`` under ``torch.inference_mode``.

    Raises:
        ArgumentError: ``layers`` is no range of the model's layers, or experts have no groups.
        ConfigError: The model cannot be split that far, or not evenly where that is wanted.
        CheckpointError: A tensor is missing, has the wrong shape or cannot be read.
    """
    checkpoint.check()
    model = CausalLM(checkpoint.config, tp=tp, experts=experts, layers=layers, dtype=dtype, device=device, uneven=uneven)
    model.load(checkpoint, pack=pack)
    return model.requires_grad_(requires_grad=False) if pack else model


def _pack(part: nn.Module) -> None:
    for module in part.modules():
        if isinstance(module, PackableLayer):
            module.pack()
