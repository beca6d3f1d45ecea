"""What a rank decides from its config and identity alone, before it meets anybody."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from parallel_runtime.comm.local import LocalHub
from parallel_runtime.config.environment import Identity, detect
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.errors import ArgumentError, ConfigError, LauncherEnvironmentError
from parallel_runtime.terms import Rank
from parallel_runtime.values import type_problem

__all__ = ["check_arguments", "choose_backend", "choose_device", "fit_child", "fit_config", "identity_within"]


def identity_within(environ: Mapping[str, str], identity: Identity | None = None, *, rank: int, world_size: int) -> Identity:
    """Who a rank of somebody else's world is.

    Args:
        environ: Variables of this process, in which a launcher may have said more.
        identity: What the caller says of it, if anything.
        rank: In that world.
        world_size: Of that world.

    Returns:
        What the caller said; or the launcher, if it is about the same rank of a world of the same size; else a rank of one host.

    Raises:
        ConfigError: ``identity`` is of another rank or size.
    """
    if identity is not None:
        if (identity.rank, identity.world_size) != (rank, world_size):
            raise ConfigError(
                f"the identity is rank {identity.rank} of {identity.world_size}, but the process group has this process as "
                f"rank {rank} of {world_size}"
            )
        return identity
    with suppress(LauncherEnvironmentError):
        detected = detect(environ, needs_master=False)
        if (detected.rank, detected.world_size) == (rank, world_size):
            return detected
    return Identity(
        rank=Rank(rank), world_size=world_size, local_rank=rank, local_world_size=world_size, num_hosts=1, host_rank=0
    )


def fit_config(config: ParallelConfig, identity: Identity) -> ParallelConfig:
    """Fit a config to the ranks that were launched.

    Args:
        config: May have a size of -1, and may speak of a part of the ranks (``rank_offset``, ``ranks``).
        identity: Of this rank.

    Returns:
        The config with every size known.

    Raises:
        ConfigError: The sizes do not multiply to the number of ranks, or this rank is not part of the config's world.
    """
    is_part = config.ranks is not None or config.rank_offset > 0
    if not is_part:
        return _fit_world(config, identity)
    if not config.is_resolved:
        raise ConfigError("a config with ranks or rank_offset needs every size; -1 is inferred for a whole world only")
    ranks = config.layout.ranks
    if identity.rank not in ranks or max(ranks) >= identity.world_size:
        raise ConfigError(
            f"rank {identity.rank} of {identity.world_size} cannot enter a config over ranks {list(ranks)}; "
            f"only those ranks enter it, and all of them must be below {identity.world_size}"
        )
    return config


def _fit_world(config: ParallelConfig, identity: Identity) -> ParallelConfig:
    try:
        return config.resolve(identity.world_size)
    except ConfigError as exc:
        if identity.source != "single":
            raise
        num_ranks = abs(config.tp * config.cp * config.dp * config.pp)
        raise ConfigError(
            f"{exc}. No launcher's variables were found, so this is a world of one: start it with "
            f"`torchrun --nproc-per-node {num_ranks} script.py`, or call `launch(fn, config)`"
        ) from None


def fit_child(config: ParallelConfig, ranks: Sequence[int] | None, parent: ParallelConfig, *, world_size: int) -> ParallelConfig:
    """Fit the config of a child context to its parent's ranks.

    Args:
        config: Of the child; may have a size of -1 unless it names ranks itself.
        ranks: World ranks of the child; ``None`` takes those the config names, or else all of the parent's.
        parent: Config of the parent.
        world_size: Of the ranks that were launched.

    Returns:
        The config with every size known, over ranks of the parent only.

    Raises:
        ConfigError: The sizes do not fit the ranks, or a rank is not one of the parent's.
    """
    is_part = config.ranks is not None or config.rank_offset > 0
    if is_part and ranks is not None:
        raise ConfigError("the child's ranks are given twice, by ranks= and by its config; leave one of them out")
    if is_part:
        chosen = tuple(config.layout.ranks)
    else:
        chosen = tuple(parent.layout.ranks if ranks is None else ranks)
        config = config.resolve(world_size=len(chosen))
    if outside := [rank for rank in chosen if rank not in parent.layout.ranks]:
        raise ConfigError(f"a child context lives on ranks of its parent, {list(parent.layout.ranks)}; it cannot have {outside}")
    return config if is_part or chosen == tuple(range(world_size)) else config.replace(ranks=chosen)


def choose_device(config: ParallelConfig, identity: Identity, *, is_thread: bool) -> torch.device:
    """Where a rank keeps its tensors.

    Args:
        config: ``device="auto"`` takes a GPU where there is one for every rank of this host and the backend can use it.
        identity: Of this rank.
        is_thread: Ranks that are threads stay on the CPU unless told otherwise.

    Returns:
        The CPU, or the GPU whose index is the local rank.

    Raises:
        ConfigError: ``device="cuda"`` without a GPU for this rank.
    """
    num_devices = torch.cuda.device_count()
    local_size = identity.local_world_size or identity.local_rank + 1
    if config.device == "auto":
        has_enough = num_devices >= local_size and config.backend in ("auto", "nccl") and not is_thread
        return torch.device("cuda", identity.local_rank) if has_enough else torch.device("cpu")
    if config.device == "cpu":
        return torch.device("cpu")
    if identity.local_rank >= num_devices:
        raise ConfigError(
            f'device="cuda" but local rank {identity.local_rank} finds {num_devices} GPUs on its host; '
            f'start at most {num_devices} ranks there, or use device="cpu"'
        )
    return torch.device("cuda", identity.local_rank)


def choose_backend(config: ParallelConfig, device: torch.device, *, has_hub: bool) -> str:
    """What moves a rank's tensors.

    Args:
        config: ``backend="auto"`` takes ``local`` for threads, ``nccl`` for GPUs and ``gloo`` for the rest.
        device: Where tensors live.
        has_hub: Whether ranks are threads with a hub.

    Returns:
        ``"local"``, ``"gloo"``, ``"nccl"`` or ``"fake"``.

    Raises:
        ConfigError: The backend does not fit the device, or ``local`` lacks a hub.
    """
    if config.backend == "auto":
        return "local" if has_hub else "nccl" if device.type == "cuda" else "gloo"
    if config.backend == "local" and not has_hub and config.world_size > 1:
        raise ConfigError('backend="local" connects threads of one process; use run_threads, or backend="gloo" for processes')
    if config.backend == "nccl" and device.type != "cuda":
        raise ConfigError('backend="nccl" moves tensors of GPUs only, but tensors live on the CPU here; use backend="gloo"')
    return config.backend


def check_arguments(config: object, identity: object, hub: object) -> None:
    """Refuse what is of another type than a context takes.

    Args:
        config: Of the context.
        identity: Of its rank, or ``None``.
        hub: For ranks that are threads, or ``None``.

    Raises:
        ArgumentError: One of them is something else.
    """
    problem = type_problem("config", config, ParallelConfig, "use one such as ParallelConfig(tp=2)")
    if identity is not None:
        problem = problem or type_problem("identity", identity, Identity, "use Identity(...), detect(...) or None")
    if hub is not None:
        problem = problem or type_problem("hub", hub, LocalHub, "use LocalHub(world_size) or None")
    if problem:
        raise ArgumentError(problem)
