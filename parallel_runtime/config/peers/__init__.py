"""Other projects' size vocabularies: the names they use, the combinations they refuse, and how both are read here."""

from parallel_runtime.config.peers.megatron import MegatronSizes
from parallel_runtime.config.peers.sglang import SglangSizes
from parallel_runtime.config.peers.torchtitan import TorchtitanSizes
from parallel_runtime.config.peers.vllm import VllmSizes

__all__ = ["MegatronSizes", "SglangSizes", "TorchtitanSizes", "VllmSizes"]
