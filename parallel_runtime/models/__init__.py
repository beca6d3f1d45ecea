"""Models, their files and their vocabularies."""

from parallel_runtime.models.checkpoint import Checkpoint
from parallel_runtime.models.config import LlamaConfig
from parallel_runtime.models.kv_cache import SlotKvCache
from parallel_runtime.models.llama import LlamaForCausalLM, load_llama
from parallel_runtime.models.resolve import EMBEDDED_MODEL, open_checkpoint, resolve_model
from parallel_runtime.models.tokenizer import ChatTemplate, Message, StreamDecoder, Tokenizer, load_tokenizer

__all__ = [
    "EMBEDDED_MODEL",
    "ChatTemplate",
    "Checkpoint",
    "LlamaConfig",
    "LlamaForCausalLM",
    "Message",
    "SlotKvCache",
    "StreamDecoder",
    "Tokenizer",
    "load_llama",
    "load_tokenizer",
    "open_checkpoint",
    "resolve_model",
]
