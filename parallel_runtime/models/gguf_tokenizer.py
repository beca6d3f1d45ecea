"""Builds a tokenizer from the metadata of a GGUF file: byte-level BPE, as GPT-2 and most models after it have it."""

from typing import TYPE_CHECKING

from parallel_runtime.errors import CheckpointError
from parallel_runtime.models.gguf import GgufArray, GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import PreTokenizer

__all__ = ["gguf_backend"]

_CONTROL, _USER_DEFINED = 3, 4
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_GPT2 = ("gpt-2", "gpt2")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2",)
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gguf_backend(file: GgufFile) -> "Backend":
    """Build the tokenizer of a GGUF file. The ``tokenizers`` package must be installed.

    Args:
        file: Open.

    Returns:
        The tokenizer.

    Raises:
        CheckpointError: The file has none, or one of a kind that is not implemented.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    kind, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise CheckpointError(f"{file.path}: tokenizer.ggml.model is {kind!r}, which is not implemented (known: gpt2)")
    pre_tokenizer = _pre_tokenizer(file, pre)
    tokens = _array(file, "tokenizer.ggml.tokens").strings()
    merges = _merges(file)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _LLAMA3))
    except Exception as exc:  # the library raises bare Exception
        raise CheckpointError(f"{file.path}: its vocabulary and merges do not fit: {exc}") from exc
    if pre in _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    types = _array(file, "tokenizer.ggml.token_type").numbers()
    backend.add_tokens(
        [AddedToken(token, normalized=False) for token, of in zip(tokens, types, strict=False) if of == _USER_DEFINED]
    )
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token, of in zip(tokens, types, strict=False) if of == _CONTROL]
    )
    bos_id = file.metadata.get("tokenizer.ggml.bos_token_id")
    if file.metadata.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3) and isinstance(bos_id, int) and bos_id < len(tokens):
        bos = tokens[bos_id]
        backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_id)])
    return backend


def _pre_tokenizer(file: GgufFile, pre: object) -> "PreTokenizer":
    """How text is cut before merges apply; they never cross such a cut."""
    from tokenizers import Regex, pre_tokenizers

    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre in (*_LLAMA3, *_QWEN2):
        pattern = _LLAMA3_WORDS if pre in _LLAMA3 else _LLAMA3_WORDS.replace("{1,3}", "")  # Qwen takes digits one by one
        words = pre_tokenizers.Split(Regex(pattern), "isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join((*_GPT2, *_SINGLE_DIGITS, *_LLAMA3, *_QWEN2))
    raise CheckpointError(f"{file.path}: tokenizer.ggml.pre is {pre!r}, which is not implemented (known: {known})")


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    """Pairs to join, most frequent first; none where the key is missing, since writers leave empty arrays out."""
    if "tokenizer.ggml.merges" not in file.metadata:
        return []
    return [_pair(file, merge) for merge in _array(file, "tokenizer.ggml.merges").strings()]


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise CheckpointError(f"{file.path}: merge {merge!r} is not two tokens with a space between")
    return left, right


def _array(file: GgufFile, key: str) -> GgufArray:
    value = file.metadata.get(key)
    if not isinstance(value, GgufArray):
        raise CheckpointError(f"{file.path}: {key} is missing or no array; a tokenizer needs it")
    return value
