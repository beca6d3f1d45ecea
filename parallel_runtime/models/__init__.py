"""Models, their files and their vocabularies."""

from parallel_runtime.models.causal_lm import CausalLM, load_model
from parallel_runtime.models.checkpoint import Checkpoint
from parallel_runtime.models.config import MixtureConfig, ModelConfig
from parallel_runtime.models.kv_cache import SlotKvCache
from parallel_runtime.models.resolve import EMBEDDED_MODEL, open_checkpoint, resolve_model
from parallel_runtime.models.stages import split_stages
from parallel_runtime.models.tokenizer import ChatTemplate, Message, StreamDecoder, Tokenizer, load_tokenizer

__all__ = [
    "EMBEDDED_MODEL",
    "CausalLM",
    "ChatTemplate",
    "Checkpoint",
    "Message",
    "MixtureConfig",
    "ModelConfig",
    "SlotKvCache",
    "StreamDecoder",
    "Tokenizer",
    "load_model",
    "load_tokenizer",
    "open_checkpoint",
    "resolve_model",
    "split_stages",
]
