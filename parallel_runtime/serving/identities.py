"""An engine as it will be, as plain data: who every process will be, and what was chosen for the user."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from parallel_runtime.models.config import ModelConfig
from parallel_runtime.serving.engine_config import EngineConfig
from parallel_runtime.serving.machine import Machine

__all__ = ["Choice", "ProcessIdentity", "ResolvedEngine"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A setting that was not given, what it became, and why.

    Attributes:
        setting: Its name.
        value: What it became.
        why: The reason, with the numbers.
    """

    setting: str
    value: str
    why: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """Who one rank will be.

    Attributes:
        replica: Its replica.
        rank: Its rank in the replica's world.
        coordinate: Its index on the dense axes, and on those of the experts where there are some.
        leads: Whether it speaks with the front process.
        host: Where it runs; on Ray its bundle of the replica's placement group.
        device: Where its tensors live.
        threads: Threads it computes with.
        layers: First and last layer it holds.
        query_heads: How many it holds.
        kv_heads: How many it holds.
        channels: Whom it exchanges messages with, beside its groups.
        groups: Its groups of several ranks, and what each opens.
        weight_bytes: Of its weights.
        kv_bytes: Of its KV cache.
        shared_bytes: Of its communicators.
    """

    replica: int
    rank: int
    coordinate: Mapping[str, int]
    leads: bool
    host: str
    device: str
    threads: int
    layers: tuple[int, int]
    query_heads: int
    kv_heads: int
    channels: tuple[str, ...]
    groups: tuple[str, ...]
    weight_bytes: int
    kv_bytes: int
    shared_bytes: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEngine:
    """An engine with nothing left to choose.

    Attributes:
        config: What the user said, with the KV cache said where several replicas share the memory.
        model_path: File or directory of the model.
        model: What the model looks like.
        machine: What the machine has.
        processes: Every rank of every replica.
        lockstep: Whether the data-parallel ranks of a replica compute in step.
        kv_cache_tokens: Tokens of KV cache of each data-parallel rank.
        max_request_tokens: Longest prompt plus new tokens of one request.
        choices: Whatever was chosen for the user.
    """

    config: EngineConfig
    model_path: str
    model: ModelConfig
    machine: Machine
    processes: tuple[ProcessIdentity, ...]
    lockstep: bool
    kv_cache_tokens: int
    max_request_tokens: int
    choices: tuple[Choice, ...]

    @property
    def needed_bytes(self) -> int:
        """Memory of all ranks together: weights, KV caches and communicators."""
        return sum(each.weight_bytes + each.kv_bytes + each.shared_bytes for each in self.processes)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            "config": self.config.model_dump(mode="json"),
            "model_path": self.model_path,
            "model": self.model.shape.model_dump(mode="json"),
            "machine": asdict(self.machine),
            "lockstep": self.lockstep,
            "kv_cache_tokens": self.kv_cache_tokens,
            "max_request_tokens": self.max_request_tokens,
            "needed_bytes": self.needed_bytes,
            "processes": [asdict(process) for process in self.processes],
            "choices": [asdict(choice) for choice in self.choices],
        }
