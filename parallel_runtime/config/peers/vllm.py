"""vLLM's sizes, what it refuses, and how they are read here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, final

from pydantic import ConfigDict

from parallel_runtime.config.peers.sizes import PeerSizes
from parallel_runtime.errors import ConfigError
from parallel_runtime.topology.sizes import divisors, join_sizes

__all__ = ["VllmSizes"]


@final
class VllmSizes(PeerSizes):
    """vLLM's sizes, by its own argument names (checked against 0.33.0).

    Attributes:
        tensor_parallel_size: Tensor-parallel size.
        pipeline_parallel_size: Pipeline stages.
        data_parallel_size: Data-parallel ranks of one world.
        prefill_context_parallel_size: Context-parallel size.
        decode_context_parallel_size: Decode-context-parallel width.
        enable_expert_parallel: Whether experts are spread over the stage (``ep`` is its size) or each is cut over it (``etp``
            is). vLLM builds its ep group, which is the whole stage, either way.

    Raises:
        ConfigError: vLLM refuses the combination.
    """

    model_config = ConfigDict(title="vLLM sizes")

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False

    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **dict.fromkeys(("tp", "tp_size"), "tensor_parallel_size"),
            **dict.fromkeys(("pp", "pp_size"), "pipeline_parallel_size"),
            **dict.fromkeys(("dp", "dp_size"), "data_parallel_size"),
            **dict.fromkeys(("cp", "pcp"), "prefill_context_parallel_size"),
            "dcp": "decode_context_parallel_size",
            "ep": "enable_expert_parallel",
        }
    )

    def settings(self) -> dict[str, object]:
        stage = self.tensor_parallel_size * self.prefill_context_parallel_size * self.data_parallel_size
        return {
            "tp": self.tensor_parallel_size,
            "cp": self.prefill_context_parallel_size,
            "dp": self.data_parallel_size,
            "pp": self.pipeline_parallel_size,
            "ep": stage if self.enable_expert_parallel else 1,
            "etp": 1 if self.enable_expert_parallel else stage,
            "dcp": self.decode_context_parallel_size,
            "order": ("tp", "cp", "pp", "dp"),
        }

    def _check_peer(self) -> None:
        tp, cp, dcp = self.tensor_parallel_size, self.prefill_context_parallel_size, self.decode_context_parallel_size
        allowed = divisors(tp) if cp == 1 else tuple(sorted({1, cp, tp * cp}))
        if dcp not in allowed:
            rule = "it must divide tensor_parallel_size" if cp == 1 else "it must be 1, the prefill size, or the product of both"
            raise ConfigError(
                f"decode_context_parallel_size={dcp} with tensor_parallel_size={tp} and prefill_context_parallel_size={cp}: in "
                f"vLLM {rule}, and dcp obeys the same rule here; sizes that work: {join_sizes(allowed)}"
            )
