"""What a rank decides from its config and identity alone, before it meets anybody."""

import torch

from parallel_runtime.config.environment import Identity
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.errors import ConfigError

__all__ = ["choose_backend", "choose_device", "fit_config"]


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
        return config.resolve(world_size=identity.world_size)
    if not config.is_resolved:
        raise ConfigError("a config with ranks or rank_offset needs every size; -1 is inferred for a whole world only")
    ranks = config.layout.ranks
    if identity.rank not in ranks or max(ranks) >= identity.world_size:
        raise ConfigError(
            f"rank {identity.rank} of {identity.world_size} cannot enter a config over ranks {list(ranks)}; "
            f"only those ranks enter it, and all of them must be below {identity.world_size}"
        )
    return config


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
