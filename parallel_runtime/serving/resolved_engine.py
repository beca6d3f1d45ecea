"""An engine as it will be: everything that follows from its config, its model and this machine, before anything is started."""

from collections.abc import Mapping, Sequence
from os import fspath
from typing import final

from parallel_runtime.config.environment import current_environ
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.config.plan import Plan
from parallel_runtime.config.plan_text import format_bytes
from parallel_runtime.errors import ConfigError
from parallel_runtime.launch.processes import threads_per_rank
from parallel_runtime.models import Checkpoint, open_checkpoint
from parallel_runtime.models.config import ModelConfig
from parallel_runtime.models.stages import split_stages
from parallel_runtime.serving.blocks import blocks_for
from parallel_runtime.serving.engine_config import EngineConfig, shared_threads
from parallel_runtime.serving.identities import Choice, ProcessIdentity, ResolvedEngine
from parallel_runtime.serving.lockstep import needs_lockstep
from parallel_runtime.serving.machine import Machine, measure_machine
from parallel_runtime.serving.shard_memory import RankShard, rank_shard
from parallel_runtime.serving.worker import check_servable
from parallel_runtime.topology.layout import Coordinate
from parallel_runtime.topology.sequence import rows_per_block

__all__ = ["resolve_checkpoint", "resolve_engine"]

_CACHE_SHARE = 0.3
_FRONT_DESCRIPTORS = 24
_RANK_DESCRIPTORS = 6
"""In the front process: its output, outcome and lifeline pipes, and its sentinel, for each rank."""


def resolve_engine(
    config: EngineConfig, *, machine: Machine | None = None, environ: Mapping[str, str] | None = None
) -> ResolvedEngine:
    """Work out an engine, and refuse one that this model or machine cannot have. Nothing is started.

    Args:
        config: What the user says.
        machine: Where it will run; this one by default.
        environ: Variables of this process by default.

    Returns:
        The engine.

    Raises:
        CheckpointError: There is no such model, it cannot be read, or its tensors are not what its config says.
        ConfigError: The model cannot be cut or served like this, or the machine has too little memory, GPUs or descriptors.
        LauncherEnvironmentError: ``OMP_NUM_THREADS`` is not a number of threads.
    """
    with open_checkpoint(config.model) as checkpoint:
        return resolve_checkpoint(config, checkpoint, machine=machine, environ=environ)


def resolve_checkpoint(
    config: EngineConfig, checkpoint: Checkpoint, *, machine: Machine | None = None, environ: Mapping[str, str] | None = None
) -> ResolvedEngine:
    """``resolve_engine`` for a model that is open already.

    Args:
        config: What the user says.
        checkpoint: The model that it names. Borrowed.
        machine: Where it will run; this one by default.
        environ: Variables of this process by default.

    Returns:
        The engine.

    Raises:
        CheckpointError: Its tensors are not what its config says.
        ConfigError: As for ``resolve_engine``.
        LauncherEnvironmentError: ``OMP_NUM_THREADS`` is not a number of threads.
    """
    _check_model(config, checkpoint)
    return _Resolver(
        config,
        fspath(checkpoint.path),
        checkpoint.config,
        measure_machine() if machine is None else machine,
        current_environ() if environ is None else environ,
    ).resolve()


def _check_model(config: EngineConfig, checkpoint: Checkpoint) -> None:
    if not config.parallel.is_resolved:
        raise ConfigError(
            "a size of -1 is filled in from the number of ranks: give world_size beside the sizes, or give every size"
        )
    shape = checkpoint.config.shape
    config.parallel.check_model(shape, uneven=config.serving.uneven)
    check_servable(config.parallel, shape)
    checkpoint.check()


@final
class _Resolver:
    """The steps of ``resolve_engine``, with what they share."""

    def __init__(self, config: EngineConfig, path: str, model: ModelConfig, machine: Machine, environ: Mapping[str, str]) -> None:
        self.config, self.path, self.model, self.machine, self.environ = config, path, model, machine, environ
        self.choices: list[Choice] = []
        self.is_threaded = config.executor == "threads"
        self.is_remote = config.executor == "ray"
        self.itemsize = 4 if config.serving.dtype == "float32" else 2

    def resolve(self) -> ResolvedEngine:
        config, parallel = self.config, self.config.parallel
        self.check_start()
        stages = split_stages(self.model, num_stages=parallel.pp, sizes=config.serving.stage_layers)
        if config.serving.stage_layers is None and parallel.pp > 1:
            self.choose("serving.stage_layers", ", ".join(str(len(stage)) for stage in stages), "stages of about equal weight")
        device = self.choose_device()
        shards = {rank: rank_shard(self.model, parallel.layout, rank, stages) for rank in range(parallel.world_size)}
        longest = min(config.serving.max_request_tokens or self.model.max_positions, self.model.max_positions)
        if config.serving.max_request_tokens is None:
            self.choose("serving.max_request_tokens", f"{longest:,}", "the model's context length")
        tokens = self.choose_cache(shards, longest, device)
        threads = self.choose_threads()
        plan = self.choose_plan(device)
        processes = tuple(
            self.identify(replica, rank, plan, shards[rank], tokens=tokens, device=device, threads=threads)
            for replica in range(config.replicas)
            for rank in range(parallel.world_size)
        )
        lockstep = needs_lockstep(parallel, self.model.shape)
        self.explain_rest(lockstep=lockstep)
        resolved = ResolvedEngine(
            config=config,
            model_path=self.path,
            model=self.model,
            machine=self.machine,
            processes=processes,
            lockstep=lockstep,
            kv_cache_tokens=tokens,
            max_request_tokens=longest,
            choices=tuple(self.choices),
        )
        self.check_memory(resolved, device)
        return resolved

    def choose(self, setting: str, value: str, why: str) -> None:
        self.choices.append(Choice(setting=setting, value=value, why=why))

    def check_start(self) -> None:
        """Refuse what could not even be started."""
        ranks = self.config.replicas * self.config.parallel.world_size
        if self.is_threaded or self.is_remote:
            return
        need = _FRONT_DESCRIPTORS * self.config.replicas + _RANK_DESCRIPTORS * ranks
        if need > self.machine.descriptors:
            raise ConfigError(
                f"{ranks} ranks need about {need} file descriptors in this process, and {self.machine.descriptors} are left; "
                "raise the limit (ulimit -n), or start fewer ranks"
            )
        if self.config.parallel.world_size > 1 and not self.machine.has_loopback:
            raise ConfigError("ranks of one replica meet on a port of 127.0.0.1, and none can be opened there")

    def choose_device(self) -> str:
        parallel, gpus = self.config.parallel, len(self.machine.gpu_bytes)
        world_size = parallel.world_size
        if self.is_remote:
            device = "cuda" if parallel.device == "cuda" else "cpu"
            self.choose("placement", f"{world_size} bundles of a placement group per replica", "Ray chooses their nodes")
            if parallel.device == "auto":
                self.choose("parallel.device", device, "what this process sees; a rank takes the GPU that Ray gives it, if any")
            return device
        if parallel.device == "cuda" and gpus < world_size:
            raise ConfigError(f'device="cuda" for {world_size} ranks, but this machine has {gpus} GPUs; every rank needs one')
        can_use = gpus >= world_size and parallel.backend in ("auto", "nccl") and not self.is_threaded
        device = "cuda" if parallel.device == "cuda" or (parallel.device == "auto" and can_use) else "cpu"
        if parallel.device == "auto":
            why = f"{gpus} GPUs for {world_size} ranks"
            self.choose("parallel.device", device, f"{why}; ranks as threads stay on the CPU" if self.is_threaded else why)
        if device == "cuda" and self.config.replicas > 1:
            raise ConfigError(
                f"replicas={self.config.replicas} on GPUs: every replica would take the GPUs from 0 on; start one engine for "
                'each, with CUDA_VISIBLE_DEVICES set, or use device="cpu"'
            )
        return device

    def choose_cache(self, shards: Mapping[int, RankShard], longest: int, device: str) -> int:
        """Tokens of KV cache of each data-parallel rank, by the rule that the ranks apply to the memory they find."""
        serving = self.config.serving
        page = serving.page_size
        if serving.kv_cache_tokens is not None:
            return blocks_for(serving.kv_cache_tokens, page) * page
        wanted = min(serving.max_batch_requests, serving.max_batch_tokens) * blocks_for(longest, page)
        if self.is_remote:
            tokens = wanted * page
            self.choose("serving.kv_cache_tokens", f"at most {tokens:,}", "ranks take less where memory is short")
            return tokens
        block_bytes = max(self.kv_bytes(shard, page) for shard in shards.values())
        sharers = 1 if device == "cuda" else self.config.replicas * len(shards)
        free = min(self.machine.gpu_bytes[: len(shards)]) if device == "cuda" else self.machine.memory_bytes
        budget = _CACHE_SHARE * free / sharers
        blocks = min(wanted, int(budget // block_bytes))
        if blocks < 1:
            raise ConfigError(
                f"not one block of {page} tokens of KV cache fits: a rank needs {format_bytes(block_bytes)} for it and may take "
                f"{_CACHE_SHARE:.0%} of {format_bytes(int(free))} shared by {sharers}; free memory, or set kv_cache_tokens"
            )
        is_enough = "all that running requests could need" if blocks == wanted else "less than running requests could need"
        why = (
            f"{is_enough}; a rank may take {format_bytes(int(budget))}: {_CACHE_SHARE:.0%} of what is free, over {sharers} ranks"
        )
        self.choose("serving.kv_cache_tokens", f"{blocks * page:,}", why)
        return blocks * page

    def kv_bytes(self, shard: RankShard, tokens: int) -> int:
        """Of what one rank keeps of whole blocks of so many tokens."""
        page = self.config.serving.page_size
        rows = tokens // page * rows_per_block(page, parts=self.config.parallel.dcp)
        return rows * shard.kv_per_token * self.itemsize

    def choose_threads(self) -> int:
        if self.is_threaded:
            return 1
        world_size = self.config.parallel.world_size
        threads = shared_threads(self.config, self.environ) or threads_per_rank(world_size, self.environ)
        ranks = self.config.replicas * world_size
        if self.environ.get("OMP_NUM_THREADS"):
            why = "OMP_NUM_THREADS says so"
        else:
            why = f"{self.machine.cores} cores over {ranks} ranks"
        if ranks * threads > self.machine.cores:
            why += f"; more than the {self.machine.cores} cores, so they take turns"
        self.choose("threads of a rank", str(threads), why)
        return threads

    def choose_plan(self, device: str) -> Plan:
        config: ParallelConfig = self.config.parallel
        backend = config.backend
        if backend == "auto":
            backend = "local" if self.is_threaded else "nccl" if device == "cuda" else "gloo"
            why = "ranks are threads" if self.is_threaded else f"tensors live on {device}"
            self.choose("parallel.backend", backend, why)
        return config.replace(backend=backend, device=device).plan()

    def explain_rest(self, *, lockstep: bool) -> None:
        config = self.config
        if config.supervision.max_restarts is None:
            restarts = config.supervision.restarts_of(config.replicas)
            why = (
                "several replicas: the others go on meanwhile"
                if config.replicas > 1
                else "one replica: its failure is the engine's"
            )
            self.choose("supervision.max_restarts", str(restarts), why)
        if config.serving.num_microbatches is None and config.parallel.pp > 1:
            self.choose("serving.num_microbatches", str(config.parallel.pp), "one per pipeline stage")
        if lockstep:
            self.choose("lockstep", "yes", "experts of one data-parallel rank are held by another")

    def identify(
        self, replica: int, rank: int, plan: Plan, shard: RankShard, *, tokens: int, device: str, threads: int
    ) -> ProcessIdentity:
        view = plan.for_rank(rank)
        place, parallel = view.coordinate, self.config.parallel
        axes = ("tp", "cp", "dp", "pp", *(("ep", "etp") if self.model.mixture is not None else ()))
        leads = place.tp == place.cp == place.pp == 0
        groups = [group for group in view.groups if group.world_size > 1 and group.opens]
        return ProcessIdentity(
            replica=replica,
            rank=rank,
            coordinate={axis: getattr(place, axis) for axis in axes},
            leads=leads,
            host=f"bundle {rank}" if self.is_remote else self.machine.host,
            device=device if self.is_remote or device == "cpu" else f"cuda:{rank}",
            threads=threads,
            layers=(shard.layers.start, shard.layers.stop - 1),
            query_heads=len(shard.heads.query),
            kv_heads=len(shard.heads.kv),
            channels=_channels(place, parallel, leads=leads),
            groups=tuple(f"{group.label} of {group.world_size}: {' + '.join(map(str, group.opens))}" for group in groups),
            weight_bytes=shard.num_weights * self.itemsize,
            kv_bytes=self.kv_bytes(shard, tokens),
            shared_bytes=view.budget.bytes,
        )

    def check_memory(self, resolved: ResolvedEngine, device: str) -> None:
        processes = resolved.processes
        if self.is_remote:
            return
        if device == "cuda":
            for process in processes:
                need, free = process.weight_bytes + process.kv_bytes, self.machine.gpu_bytes[process.rank]
                if need > free:
                    raise ConfigError(
                        f"rank {process.rank} needs {_needs([process])} on {process.device}, which has {format_bytes(free)}"
                    )
            return
        if resolved.needed_bytes > self.machine.memory_bytes:
            raise ConfigError(
                f"{len(processes)} ranks need {_needs(processes)}, and {format_bytes(self.machine.memory_bytes)} are free; use "
                "fewer replicas, bfloat16, a smaller kv_cache_tokens, or tp and pp instead of dp"
            )


def _needs(processes: Sequence[ProcessIdentity]) -> str:
    weights = sum(process.weight_bytes for process in processes)
    cache = sum(process.kv_bytes for process in processes)
    return f"{format_bytes(weights)} for weights and {format_bytes(cache)} for the KV cache"


def _channels(place: Coordinate, parallel: ParallelConfig, *, leads: bool) -> tuple[str, ...]:
    """Whom a rank exchanges messages with."""
    others = parallel.tp * parallel.cp * parallel.pp - 1
    channels = ["front"] if leads else []
    if others:
        channels.append(f"steps to {others} ranks" if leads else "steps from the leader")
    if place.pp > 0:
        channels.append(f"hidden states from stage {place.pp - 1}")
    if place.pp < parallel.pp - 1:
        channels.append(f"hidden states to stage {place.pp + 1}")
    if place.pp == parallel.pp - 1 > 0 and place.tp == place.cp == 0:
        channels.append("tokens to the leader")
    return tuple(channels)
