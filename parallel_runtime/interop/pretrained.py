"""Models of ``transformers``, sharded by their own tensor-parallel plan over a context."""

from typing import Any, TypeVar

from torch import nn

from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.interop.mesh import device_mesh

__all__ = ["shard_pretrained"]

_Model = TypeVar("_Model", bound=nn.Module)


def shard_pretrained(model: _Model, ctx: ParallelContext) -> _Model:
    """Shard a model over ``ctx.tp`` the way its authors planned it.

    The same as ``from_pretrained(..., distributed_config=DistributedConfig(tp_plan="auto"))``, which would make a default process
    group. Each rank loads the whole model first and keeps its shards. Ranks that are threads load one after another:
    ``from_pretrained`` patches its own classes while it runs.

    Args:
        model: From ``from_pretrained``, equal on every rank.
        ctx: Open.

    Returns:
        ``model`` itself, with ``DTensor`` parameters where the plan has them.

    Raises:
        ArgumentError: The model has no such plan.
        ConfigError: ``transformers`` is missing, or older than 5.20.

    Collective: none.
    """
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise ConfigError(
            "sharding a model of transformers needs transformers >= 5.20: pip install 'transformers>=5.20'"
        ) from error
    theirs: Any = model
    plan = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        raise ArgumentError(f"{type(model).__name__} has no tensor-parallel plan; set model.tp_plan, or use models.load_model")
    apply_tensor_parallelism(theirs, device_mesh(ctx, "tp"), theirs._expand_parallel_plan(plan))
    return model
