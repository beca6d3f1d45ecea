"""Text to token ids and back, with the vocabulary that a model file carries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias, final

from parallel_runtime.errors import CheckpointError, RequestError
from parallel_runtime.models.checkpoint import Checkpoint
from parallel_runtime.models.gguf_checkpoint import GgufCheckpoint
from parallel_runtime.models.gguf_tokenizer import gguf_backend
from parallel_runtime.models.safetensors import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

__all__ = ["ChatTemplate", "Message", "StreamDecoder", "Tokenizer", "load_tokenizer"]

Message: TypeAlias = Mapping[str, str]
"""One turn of a chat, with ``role`` and ``content``."""

_INCOMPLETE = "\ufffd"
_MOST_INCOMPLETE = 3  # bytes of a character that lacks one; some decoders write each of them down as U+FFFD
_LONGEST_WINDOW = 64
_KEPT_OF_WINDOW = 8


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """How a model wants a chat written down.

    Attributes:
        source: Jinja template, run in a sandbox.
        bos_token: Text of the begin-of-sequence token, or ``""``.
        eos_token: Text of the end-of-sequence token, or ``""``.
    """

    source: str
    bos_token: str = ""
    eos_token: str = ""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Write ``messages`` down.

        Args:
            messages: The turns so far.
            add_generation_prompt: Whether the model's turn is opened at the end.

        Raises:
            RequestError: The template refuses these messages.
            CheckpointError: jinja2 is not installed, or the template is broken.
        """
        try:
            from jinja2 import TemplateError, TemplateSyntaxError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as exc:
            raise CheckpointError("chat templates need: pip install 'parallel-runtime[demo]'") from exc

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            return environment.from_string(self.source).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        except TemplateSyntaxError as exc:
            raise CheckpointError(f"the model's chat template is broken: {exc}") from exc
        except (TemplateError, TypeError) as exc:
            raise RequestError(f"the model's chat template refuses these messages: {exc}") from exc


@final
class Tokenizer:
    """The vocabulary of one model.

    Args:
        backend: The ``tokenizers.Tokenizer`` that does the work.
        bos_id: Begin-of-sequence token, where there is one.
        eos_ids: Tokens that end a text.
        chat_template: How a chat is written down, where the model has a template.

    Attributes:
        vocab_size: Ids it knows, added tokens included.
        bos_id: Begin-of-sequence token, where there is one.
        eos_ids: Tokens that end a text.
        chat_template: How a chat is written down, where the model has a template.
    """

    def __init__(
        self,
        backend: "Backend",
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self.vocab_size = backend.get_vocab_size()
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Cut text into tokens.

        Args:
            text: Names of special tokens in it become those tokens.
            add_special_tokens: Whether the tokens that this model puts around every text (such as bos) are added.

        Returns:
            Their ids.
        """
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Put tokens together. Bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = True) -> "StreamDecoder":
        """A decoder that takes tokens one by one."""
        return StreamDecoder(self, skip_special_tokens=skip_special_tokens)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Write a chat down as the model wants it, up to where its answer begins.

        Args:
            messages: The turns so far.

        Returns:
            Token ids.

        Raises:
            RequestError: The model has no chat template, or its template refuses these messages.
            CheckpointError: jinja2 is not installed, or the template is broken.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template; encode a prompt of your own")
        return self.encode(self.chat_template.render(messages), add_special_tokens=False)


@final
class StreamDecoder:
    """Decodes tokens as they come; never gives out half a character.

    Everything that ``push`` and ``flush`` return, joined, is what ``decode`` of all the tokens gives.

    Args:
        tokenizer: Of the model.
        skip_special_tokens: As for ``decode``.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # some tokens of context, then those whose text is not all out
        self._context = 0
        self._given = ""  # of the window's text, what is out

    def push(self, token: int) -> str:
        """Take one more token; returns the text that is certain now, maybe none."""
        self._window.append(token)
        text, num_new_tokens = self._text(), len(self._window) - self._context
        certain = len(text) - _num_incomplete(text)
        is_endless = num_new_tokens > _LONGEST_WINDOW  # special tokens, or bytes that are no text
        if not (text.startswith(self._given) or is_endless):  # some decoders take whole characters back meanwhile
            return ""
        new = text[len(self._given) : certain]
        self._given += new
        if new and certain == len(text):  # a clean cut: what came since the last one is context enough for what follows
            self._keep(self._window[self._context :], held=0)
            self._context = len(self._window)
        elif is_endless:
            self._keep(self._window[-_KEPT_OF_WINDOW:], held=len(text) - certain)
            self._context = 0
        return new

    def flush(self) -> str:
        """The rest, with U+FFFD for a character that never came to its end."""
        rest = self._text()[len(self._given) :]
        self._window, self._context, self._given = [], 0, ""
        return rest

    def _keep(self, window: list[int], *, held: int) -> None:
        self._window = window
        text = self._text()
        self._given = text[: len(text) - held]

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)


def _num_incomplete(text: str) -> int:
    """Characters at the end that the next tokens may still change."""
    end = text[-_MOST_INCOMPLETE:]
    return len(end) - len(end.rstrip(_INCOMPLETE))


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Build the tokenizer of a model.

    Args:
        checkpoint: Open; may be closed afterwards.

    Returns:
        The tokenizer: of the metadata of a GGUF file, or of the ``tokenizer.json`` in a directory.

    Raises:
        CheckpointError: There is none, it is of a kind that is not implemented, or tokenizers is not installed.
        ContextStateError: The checkpoint is closed.
    """
    try:
        import tokenizers
    except ImportError as exc:
        raise CheckpointError("tokenizers are built with: pip install 'parallel-runtime[demo]'") from exc
    if isinstance(checkpoint, GgufCheckpoint):
        return _from_gguf(checkpoint)
    path = checkpoint.path / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{path}: missing; a tokenizer is read from it")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer: {exc}") from exc
    eos_ids = dict.fromkeys((*checkpoint.config.eos_ids, *_generation_eos_ids(checkpoint.path)))
    template = _directory_template(checkpoint.path)
    return Tokenizer(backend, bos_id=checkpoint.config.bos_id, eos_ids=tuple(eos_ids), chat_template=template)


def _from_gguf(checkpoint: GgufCheckpoint) -> Tokenizer:
    backend = gguf_backend(checkpoint.file)
    config = checkpoint.config
    source = checkpoint.file.metadata.get("tokenizer.chat_template")
    template = None
    if isinstance(source, str):
        bos = backend.id_to_token(config.bos_id) if config.bos_id is not None else None
        eos = backend.id_to_token(config.eos_ids[0]) if config.eos_ids else None
        template = ChatTemplate(source=source, bos_token=bos or "", eos_token=eos or "")
    return Tokenizer(backend, bos_id=config.bos_id, eos_ids=config.eos_ids, chat_template=template)


def _generation_eos_ids(folder: Path) -> tuple[int, ...]:
    found = _optional_json(folder / "generation_config.json").get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    return tuple(token for token in ids if isinstance(token, int))


def _directory_template(folder: Path) -> ChatTemplate | None:
    raw = _optional_json(folder / "tokenizer_config.json")
    own_file = folder / "chat_template.jinja"
    source = own_file.read_text(encoding="utf-8") if own_file.exists() else raw.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source=source, bos_token=_token_text(raw.get("bos_token")), eos_token=_token_text(raw.get("eos_token")))


def _token_text(value: object) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _optional_json(path: Path) -> Mapping[str, object]:
    raw = read_json(path) if path.exists() else {}
    return raw if isinstance(raw, dict) else {}
