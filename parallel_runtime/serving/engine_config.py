"""Everything a user says about an engine, in one frozen value."""

import os
from collections.abc import Mapping
from os import PathLike, fspath
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict, Unpack, final

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from parallel_runtime.config.base import FrozenModel
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.config.peers import MegatronSizes, SglangSizes, TorchtitanSizes, VllmSizes
from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.serving.sampling_params import SamplingParams
from parallel_runtime.serving.serving_config import ServingConfig
from parallel_runtime.serving.supervision import Supervision
from parallel_runtime.values import shown

__all__ = ["EngineConfig", "EngineSettings", "ExecutorKind", "engine_config", "shared_threads"]

ExecutorKind: TypeAlias = Literal["processes", "threads", "ray"]
"""What ranks are: processes of this machine, or threads of this process."""

_DIALECTS: Mapping[str, type[FrozenModel]] = MappingProxyType(
    {"sglang": SglangSizes, "vllm": VllmSizes, "megatron": MegatronSizes, "torchtitan": TorchtitanSizes}
)


def _as_sampling(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    given: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
    return SamplingParams(**given)


def _as_builtins(value: SamplingParams) -> dict[str, Any]:
    defaults = SamplingParams()
    return {
        name: msgspec.to_builtins(item)
        for name in value.__struct_fields__
        if (item := getattr(value, name)) != getattr(defaults, name)
    }


@final
class EngineConfig(FrozenModel):
    """A model, how it is cut and copied, and how it serves.

    ``parallel`` may also be a mapping, of ``ParallelConfig``'s settings or, with ``dialect``, of another project's sizes under
    its own names: ``{"dialect": "vllm", "tensor_parallel_size": 2}``. SGLang's ``dp_size`` without ``enable_dp_attention`` means
    ``replicas``.

    Attributes:
        model: ``"smollm2"``, a GGUF file, or a directory with ``config.json`` and safetensors.
        parallel: Sizes of one world, and how its ranks talk.
        replicas: Independent worlds, each with the whole model.
        executor: Ranks as ``"processes"`` of this machine, as ``"ray"`` actors of a cluster, or as ``"threads"`` of this process,
            which suits tests.
        serving: How each world serves: dtype, memory, limits.
        supervision: When a replica counts as lost, and when it is started again.
        sampling: How requests are continued that do not say so themselves.

    Raises:
        ConfigError: A value breaks a rule.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str = Field(default="smollm2", min_length=1)
    parallel: ParallelConfig = ParallelConfig()
    replicas: int = Field(default=1, ge=1)
    executor: ExecutorKind = "processes"
    serving: ServingConfig = ServingConfig()
    supervision: Supervision = Supervision()
    sampling: Annotated[SamplingParams, BeforeValidator(_as_sampling), PlainSerializer(_as_builtins)] = SamplingParams()

    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **dict.fromkeys(("model_path", "model_name", "checkpoint"), "model"),
            **dict.fromkeys(("num_replicas", "data_parallel_replicas"), "replicas"),
            **dict.fromkeys(("tp", "pp", "dp", "ep", "sizes", "config"), "parallel"),
            **dict.fromkeys(("dtype", "page_size", "kv_cache_tokens", "limits", "memory"), "serving"),
            **dict.fromkeys(("max_restarts", "health_s", "restarts"), "supervision"),
            **dict.fromkeys(("temperature", "sampling_params", "max_new_tokens"), "sampling"),
        }
    )

    @model_validator(mode="before")
    @classmethod
    def _read_dialect(cls, values: Any) -> Any:
        parallel = values.get("parallel") if isinstance(values, Mapping) else None
        if not isinstance(parallel, Mapping):
            return values
        config, replicas = _read_parallel(parallel)
        if replicas is None:
            return {**values, "parallel": config}
        if values.get("replicas", replicas) != replicas:
            raise ConfigError(
                f"replicas={values['replicas']} but SGLang's dp_size={replicas} without enable_dp_attention means {replicas} "
                "replicas; leave one of them out"
            )
        return {**values, "parallel": config, "replicas": replicas}


class EngineSettings(TypedDict, total=False):
    """The settings of an ``EngineConfig`` but the model, as keywords."""

    parallel: ParallelConfig | None
    replicas: int
    executor: ExecutorKind
    serving: ServingConfig | None
    supervision: Supervision | None
    sampling: SamplingParams | None


def engine_config(model: str | PathLike[str] | EngineConfig, **settings: Unpack[EngineSettings]) -> EngineConfig:
    """Read what an engine was called with.

    Args:
        model: Name or path of a model, or a whole config.
        **settings: Further settings of a config; ``None`` is the default.

    Returns:
        The config.

    Raises:
        ArgumentError: ``model`` is neither, or a config comes with further settings.
        ConfigError: A setting breaks a rule.
    """
    if isinstance(model, EngineConfig):
        if settings:
            raise ArgumentError(
                f"an EngineConfig says everything, and {', '.join(settings)} came beside it; use config.replace(...) to change it"
            )
        return model
    if not isinstance(model, str | PathLike):
        raise ArgumentError(
            f"model={shown(model)} is neither a name nor a path; give 'smollm2', a .gguf file, a model's directory, or an "
            "EngineConfig"
        )
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    return EngineConfig(model=fspath(model), **given)


def shared_threads(config: EngineConfig, environ: Mapping[str, str]) -> int | None:
    """Say how many threads a rank computes with where several replicas share the cores.

    Args:
        config: Of the engine.
        environ: ``OMP_NUM_THREADS`` in it decides alone.

    Returns:
        The number, at least 1; ``None`` where the launcher's own choice is right.
    """
    if config.replicas == 1 or environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, len(os.sched_getaffinity(0)) // (config.replicas * config.parallel.world_size))


def _read_parallel(values: Mapping[str, Any]) -> tuple[ParallelConfig, int | None]:
    """Sizes in whatever words, and the replicas they mean where they mean some."""
    given = dict(values)
    dialect = given.pop("dialect", None)
    if dialect is None:
        world_size = given.pop("world_size", None)
        config = ParallelConfig.model_validate(given)
        return (config if world_size is None else config.resolve(world_size=world_size)), None
    if dialect not in _DIALECTS:
        raise ConfigError(f"dialect={shown(dialect)} is unknown; there are {', '.join(_DIALECTS)}")
    model = _DIALECTS[dialect]
    ours = set(ParallelConfig.model_fields) - {*model.model_fields, "tp", "pp", "dp", "cp", "ep", "etp", "dcp", "order"}
    settings = {name: given.pop(name) for name in list(given) if name in ours}
    replicas = None
    if dialect == "sglang" and not given.get("enable_dp_attention") and type(given.get("dp_size")) is int:
        replicas = given.pop("dp_size")
    sizes: Any = model.model_validate(given)
    return ParallelConfig.model_validate({**sizes.settings(), **settings}), replicas
