"""One rank's worker: builds its shard, agrees on memory and seeds with its replica, and runs batches through the pipeline.

Legend: T tokens of a batch, D hidden size.
"""

import os
import secrets
from collections import deque
from pathlib import Path
from typing import final

import msgspec
import torch
from torch import Tensor

from parallel_runtime.comm import Channel, GroupCoordinator, SendHandle
from parallel_runtime.config import ModelShape
from parallel_runtime.config.checks import check_kept_heads
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.context.capture import GraphDevice
from parallel_runtime.errors import ArgumentError, ConfigError, ContextStateError
from parallel_runtime.layers import ExpertGroups
from parallel_runtime.models.causal_lm import CausalLM, load_model
from parallel_runtime.models.checkpoint import Checkpoint
from parallel_runtime.models.resolve import open_checkpoint
from parallel_runtime.models.stages import split_stages
from parallel_runtime.serving.batch import Batch
from parallel_runtime.serving.blocks import blocks_for
from parallel_runtime.serving.context_groups import ContextGroups
from parallel_runtime.serving.controls import RankProfile
from parallel_runtime.serving.graphs import graph_sizes
from parallel_runtime.serving.lockstep import needs_lockstep
from parallel_runtime.serving.memory import available_bytes, give_back
from parallel_runtime.serving.messages import Sampled
from parallel_runtime.serving.model_weights import ModelWeights
from parallel_runtime.serving.policy import PolicyLimits
from parallel_runtime.serving.runner import ModelRunner
from parallel_runtime.serving.serving_config import ServingConfig
from parallel_runtime.serving.timeline import Timeline
from parallel_runtime.serving.token_keys import mix_seed
from parallel_runtime.topology.shards import split_experts

__all__ = ["TpModelWorker", "check_servable"]

_CACHE_SHARE = 0.3


def check_servable(parallel: ParallelConfig, shape: ModelShape) -> None:
    """Refuse a layout that serving has no use for.

    Args:
        parallel: Sizes of the world.
        shape: Of the model.

    Raises:
        ConfigError: It spreads tokens over ranks with different key/value heads, or experts where a dense model has none.
    """
    check_kept_heads(shape, parallel.layout)
    if parallel.ep > 1 and not shape.num_experts:
        raise ConfigError(
            f"ep={parallel.ep}: this model is dense and has no experts to spread; use ep=1 (in vLLM's words "
            "enable_expert_parallel=False, in SGLang's ep_size=1, in Megatron's expert_model_parallel_size=1)"
        )


@final
class TpModelWorker:
    """One rank of a replica: the ranks that differ in tp, cp and pp alone and hold one model together.

    Args:
        ctx: Open context of this rank. Borrowed.
        model: ``"smollm2"``, a GGUF file or a directory with ``config.json`` and safetensors.
        config: How to serve; equal on every rank.
        graphs: What captures decode steps; by default CUDA's own graphs on CUDA, and nothing elsewhere.

    Attributes:
        replica: Group of the ranks of this replica. Groups of different replicas never wait for each other.
        is_in_lockstep: Whether experts span replicas, so that every batch is computed by all replicas or by none.
        limits: What the replica may do at once, its KV cache included; equal on all of its ranks.
        vocab_size: Token ids below this exist.
        weights: This rank's part of the model.
        timeline: What this rank does when, while somebody wants to know.
        seed: Base of the random streams; equal on the ranks of a replica, different between replicas.

    Raises:
        CheckpointError: There is no such model, or it cannot be read.
        ConfigError: The model cannot be split like this, ``check_servable`` refuses, or not one block of KV cache fits.

    Collective: opening the replica's group, then two small messages over it, and capturing where there are decode graphs; all
        of its ranks.
    """

    def __init__(
        self,
        ctx: ParallelContext,
        *,
        model: str | Path,
        config: ServingConfig | None = None,
        graphs: GraphDevice | None = None,
    ) -> None:
        config = config or ServingConfig()
        self._ctx = ctx
        self.replica: GroupCoordinator = ctx.open_group("tp", "cp", "pp")
        self._config = config
        self._graphs = graphs
        self.timeline = Timeline(rank=ctx.rank, stage=ctx.pp.rank_in_group)
        with open_checkpoint(model) as checkpoint:
            check_servable(ctx.config, checkpoint.config.shape)
            self.is_in_lockstep = needs_lockstep(ctx.config, checkpoint.config.shape)
        group = ctx.world if self.is_in_lockstep else self.replica
        self.weights = ModelWeights(ctx, group=group, model=model, build=self._build)
        self._context = ContextGroups.of(ctx, self.weights.config)
        self._runner: ModelRunner | None = self._make_runner()
        self.vocab_size = self.weights.config.vocab_size
        self.limits = self._agree_limits(config, self.weights.config.max_positions)
        self._open_cache()
        self.seed = self._agree_seed(config.seed)
        self._done: deque[Sampled] = deque()
        self._tokens = self._open_tokens()

    @property
    def is_leader(self) -> bool:
        """Whether this rank leads its replica: tp=0, cp=0, pp=0."""
        return self.replica.is_first_rank

    @property
    def runner(self) -> ModelRunner:
        """This rank's shard with its KV cache.

        Raises:
            ContextStateError: It is asleep.
        """
        if self._runner is None:
            raise ContextStateError("this worker is asleep and has neither weights nor a KV cache; wake it first")
        return self._runner

    def swap_weights(self, version: int | None = None) -> None:
        """Serve with the weights that ``weights.load`` or ``weights.receive`` made; what the KV cache holds is gone.

        Args:
            version: Of the new weights; one more than before by default.

        Raises:
            ContextStateError: There are no new weights.
            PeerError: A rank failed or left while graphs were captured.

        Collective: nothing; capturing where there are decode graphs, on all ranks of the replica.
        """
        self.weights.swap(version)
        self._open_runner()

    def sleep(self) -> None:
        """Give back the memory of weights and KV cache; no batch may be under way. Twice is nothing.

        Raises:
            PeerFailedError: Some rank could not keep its weights. Nobody sleeps.
            PeerError: A rank failed or left.

        Collective: as ``ModelWeights.sleep``, and a barrier: the memory of all ranks is free once it returns.
        """
        self.weights.sleep()
        self._drop_runner()
        give_back()
        self.replica.barrier()

    def wake(self) -> None:
        """Take the memory again, with the same weights and an empty KV cache. Twice is nothing.

        Raises:
            PeerFailedError: Some rank could not read its weights. All sleep on.
            PeerError: A rank failed or left.

        Collective: as ``ModelWeights.wake``, and capturing where there are decode graphs.
        """
        if self._runner is None:
            self.weights.wake()
            self._open_runner()

    def forward(self, batch: Batch) -> tuple[int, ...] | None:
        """Run one batch through every stage and choose its tokens: ``start``, and ``finish`` on the leader.

        Args:
            batch: At least one chunk; equal on every rank of the replica.

        Returns:
            The token of each of ``batch.sampled`` on the leader, ``None`` on the other ranks.

        Raises:
            PeerError: A rank of the replica failed or left.

        Collective: as ``start``.
        """
        self.start(batch)
        return self.finish().token_ids if self.is_leader else None

    def start(self, batch: Batch) -> None:
        """Do this rank's part of one batch. Earlier stages are done before later ones, and may start the next batch meanwhile.

        Args:
            batch: Equal on every rank of the replica. One without chunks only takes part in the exchange of experts: it has no
                result, and nothing to finish.

        Raises:
            PeerError: A rank of the replica failed or left.

        Collective: those of the model on each stage; hidden states from stage to stage, tokens from the last one to the leader.
        """
        hidden_TD, _ = self._run_stage(batch)
        if not self._ctx.pp.is_last_rank or not batch.chunks:
            return
        started_s = self.timeline.now()
        sampled = self.runner.sample(batch, hidden_TD, base_seed=self.seed)
        self.timeline.add("compute", started_s, num_tokens=batch.num_tokens)
        if self._tokens is not None and not self.is_leader:
            self._tokens.send(sampled)
        elif self.is_leader:
            self._done.append(sampled)

    def finish(self) -> Sampled:
        """Wait for the oldest batch that was started; on the leader alone.

        Returns:
            The token of each of its ``sampled``, and what else is wanted.

        Raises:
            ArgumentError: This rank does not lead its replica, or no batch is under way.
            PeerError: A rank of the replica failed or left.
        """
        if self._tokens is not None and self.is_leader:
            return self._tokens.recv(timeout_s=self._ctx.config.deadlines.control_s)
        if not self._done:
            raise ArgumentError("finish takes the result of a batch that was started, on the leader of the replica alone")
        return self._done.popleft()

    def run_stages(self, batch: Batch) -> Tensor:
        """Run one batch through the layers of every stage, without choosing tokens. Returns once the next stage has its input.

        Args:
            batch: At least one chunk; equal on every rank of the replica.

        Returns:
            ``(T, D)`` as this rank's stage leaves it, with cp its share of the rows; on the last stage, what ``logits`` takes.

        Raises:
            PeerError: A rank of the replica failed or left.

        Collective: those of the model on each stage; hidden states from stage to stage.
        """
        hidden_TD, handover = self._run_stage(batch)
        if handover is not None:
            handover.wait()
        return hidden_TD

    def profile(self) -> tuple[RankProfile, ...]:
        """End the profile that ``timeline.start`` began.

        Returns:
            What each rank of the replica did, in their order.

        Collective: one message of every rank of the replica.
        """
        told = self.replica.all_gather_object(msgspec.to_builtins(self.timeline.stop()))
        return tuple(msgspec.convert(each, RankProfile) for each in told)

    def describe(self) -> str:
        """Who this rank is and what it runs on, in one line."""
        ctx, model, place = self._ctx, self.runner.model, self._ctx.coordinate
        where = " ".join(f"{axis}={getattr(place, axis)}" for axis in ("tp", "pp", "dp", *(("cp",) if ctx.config.cp > 1 else ())))
        where += f", pid {os.getpid()} on {ctx.device}"
        what = f"layers {model.layers.start}-{model.layers.stop - 1}"
        what += f", {model.num_query_heads} query and {model.num_kv_heads} KV heads"
        groups = [ctx.tp, ctx.pp, ctx.cp, ctx.dcp]
        if model.config.mixture is not None:
            own = split_experts(model.config.mixture.num_experts, ep=ctx.ep.world_size)[place.ep]
            what += f", experts {own.start}-{own.stop - 1}"
            groups += [ctx.ep, ctx.etp]
        told = "; ".join(group.describe() for group in groups if group.world_size > 1)
        return f"rank {ctx.rank}: {where}; {what}; {told or 'no groups'}"

    def _run_stage(self, batch: Batch) -> tuple[Tensor, SendHandle | None]:
        """This stage's part, and its sending to the next one; the group keeps what it needs even where nobody waits."""
        pp, timeline, num_tokens = self._ctx.pp, self.timeline, batch.num_tokens
        started_s = timeline.now()
        inputs_TD = None if pp.is_first_rank else pp.recv(src=pp.rank_in_group - 1)
        if inputs_TD is not None:
            timeline.add("receive", started_s, num_tokens=num_tokens)
            started_s = timeline.now()
        hidden_TD = self.runner.forward(batch, inputs_TD)
        timeline.add("compute", started_s, num_tokens=num_tokens)
        handover = None if pp.is_last_rank else pp.isend(hidden_TD, dst=pp.rank_in_group + 1, copy=False)
        return hidden_TD, handover

    def _build(self, checkpoint: Checkpoint) -> CausalLM:
        """This rank's part of a model, from its weights."""
        ctx = self._ctx
        stages = split_stages(checkpoint.config, num_stages=ctx.pp.world_size, sizes=self._config.stage_layers)
        return load_model(
            checkpoint,
            tp=ctx.tp,
            experts=ExpertGroups(tp=ctx.tp, ep=ctx.ep, etp=ctx.etp),
            layers=stages[ctx.pp.rank_in_group],
            dtype=torch.float32 if self._config.dtype == "float32" else torch.bfloat16,
            device=ctx.device,
            uneven=self._config.uneven,
            pack=True,
        )

    def _make_runner(self) -> ModelRunner:
        return ModelRunner(self.weights.model, page_size=self._config.page_size, context=self._context)

    def _open_runner(self) -> None:
        """Begin with an empty KV cache; an earlier one is given back first."""
        self._drop_runner()
        self._runner = self._make_runner()
        self._open_cache()

    def _drop_runner(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    def _open_cache(self) -> None:
        """Make the KV cache, and the graphs that work on it where there are any."""
        runner, limits, graphs = self.runner, self.limits, self._graphs
        can_capture = (
            runner.can_capture and self._config.decode_graphs and (graphs is not None or self._ctx.device.type == "cuda")
        )
        runner.open_cache(limits.num_blocks, device=self._ctx.device, for_graphs=can_capture)
        if can_capture:
            with self._ctx.graph_capture(group=self.replica, graphs=graphs) as capture:
                runner.capture_decodes(graph_sizes(limits.max_batch_requests, limits.max_request_tokens), capture)

    def _agree_limits(self, config: ServingConfig, context_length: int) -> PolicyLimits:
        longest = min(config.max_request_tokens or context_length, context_length)
        at_once = min(config.max_batch_requests, config.max_batch_tokens)
        if config.kv_cache_tokens is not None:
            num_blocks = blocks_for(config.kv_cache_tokens, config.page_size)
        else:
            budget = _CACHE_SHARE * available_bytes(self._ctx.device) / self._num_ranks_on_device()
            num_blocks = min(at_once * blocks_for(longest, config.page_size), int(budget // self.runner.block_bytes))
        num_blocks = min(self.replica.all_gather_object(num_blocks))
        if num_blocks < 1:
            raise ConfigError(
                f"not one block of {config.page_size} tokens of KV cache fits into {_CACHE_SHARE:.0%} of the free memory of some "
                f"rank; this one needs {self.runner.block_bytes} bytes for it; free memory or set kv_cache_tokens"
            )
        return PolicyLimits(
            num_blocks=num_blocks,
            page_size=config.page_size,
            max_batch_tokens=config.max_batch_tokens,
            max_batch_requests=at_once,
            max_waiting=config.max_waiting,
            max_request_tokens=longest,
            num_slots=config.num_microbatches or self._ctx.pp.world_size,
            prefix_reuse=config.prefix_reuse,
        )

    def _open_tokens(self) -> Channel[Sampled] | None:
        """The way of the tokens from the last stage to the leader; between two ranks, where they are not the same."""
        pp, place = self._ctx.pp, self._ctx.coordinate
        if pp.world_size == 1 or place.tp or place.cp or not (pp.is_first_rank or pp.is_last_rank):
            return None
        return pp.channel("tokens", Sampled, peer=pp.world_size - 1 if pp.is_first_rank else 0)

    def _agree_seed(self, seed: int | None) -> int:
        if seed is None:
            seed = int(self.replica.broadcast_object(secrets.randbits(63)))
        return mix_seed(seed, self._ctx.coordinate.dp)

    def _num_ranks_on_device(self) -> int:
        return 1 if self._ctx.device.type == "cuda" else self._ctx.world_size
