"""What a caller sets about one request: how its tokens are chosen, and when it ends."""

import difflib
from math import inf, nextafter
from types import MappingProxyType
from typing import Any

import msgspec

from parallel_runtime.errors import RequestError
from parallel_runtime.serving.checks import check_integer, check_number, check_tokens

__all__ = ["SamplingParams"]

_GREEDY_BELOW = 1e-6
_ABOVE_ZERO = nextafter(0.0, inf)
_HIGHEST = 1.7976931348623157e308
_MAX_LOGPROBS = 20
_MAX_SAMPLES = 128
_MAX_STOPS = 16
_MAX_STOP_LENGTH = 256

_OTHER_NAMES = MappingProxyType(
    {
        **dict.fromkeys(("max_tokens", "max_length", "max_completion_tokens"), "max_new_tokens"),
        **dict.fromkeys(("min_tokens", "min_length"), "min_new_tokens"),
        **dict.fromkeys(("stop_strings", "stop_sequences", "until"), "stop"),
        **dict.fromkeys(("eos_token_id", "stop_tokens"), "stop_token_ids"),
        **dict.fromkeys(("best_of", "num_return_sequences"), "n"),
        "top_logprobs": "logprobs",
        "random_seed": "seed",
    }
)


class _ByName(msgspec.StructMeta):
    """Says which setting is meant where an instance is made with a name that other projects use."""

    def __call__(self, *unnamed: object, **values: object) -> Any:
        known = self.__struct_fields__
        if unnamed:
            raise RequestError(
                f"{self.__name__} takes no values without names; give them by name: {self.__name__}({known[0]}=...)"
            )
        for name in values:
            if name not in known:
                close = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
                hint = f"did you mean {close!r}?" if close else f"it has {', '.join(known)}"
                raise RequestError(f"{self.__name__} has no setting {name!r}; {hint}")
        return super().__call__(**values)


class SamplingParams(msgspec.Struct, metaclass=_ByName, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen and when it ends.

    Penalties come first, then ``min_new_tokens``, ``temperature``, ``top_k``, ``top_p`` and ``min_p``, each on what is left
    then, as in ``transformers``. Of tokens with equal logits the lower id counts as the likelier.

    Attributes:
        max_new_tokens: Tokens to make at most, at least 1.
        temperature: 0 is greedy; above 0 draws from the softmax of ``logits / temperature``. What is below 1e-6 is greedy too: no
            other token is left with a probability.
        top_k: Draw among the ``top_k`` most likely tokens only; ``None`` keeps all.
        top_p: Draw among the fewest most likely tokens whose probabilities reach ``top_p``, in ``(0, 1]``.
        min_p: Draw among tokens at least ``min_p`` times as likely as the likeliest, in ``[0, 1]``; 0 keeps all.
        repetition_penalty: Above 0. Logits of tokens in the prompt or made so far are divided by it where positive, multiplied
            where negative; 1 changes nothing.
        presence_penalty: Taken off the logits of tokens made so far, in ``[-2, 2]``.
        frequency_penalty: Taken off the logits of tokens made so far, as often as they were made, in ``[-2, 2]``.
        seed: Seed of this request's own random stream; equal seeds, equal tokens on every layout. ``None``: one is drawn.
        n: Answers to make of one prompt, up to 128; each has a random stream of its own, the first one that of ``n=1``.
        logprobs: Tell the log-probability of each new token, and those of that many most likely ones, up to 20. They are the
            model's, before penalties and temperature. ``None`` tells none.
        stop: Texts that end the request, up to 16 of 256 characters; what is given out ends before the first one that comes.
        stop_token_ids: The request ends after one of these tokens.
        min_new_tokens: Tokens to make at least: until then no token of ``stop_token_ids`` and no end of sequence is chosen, and a
            text of ``stop`` does not count.
        ignore_eos: Go on after the model's end-of-sequence token.
        skip_special_tokens: Leave special tokens out of the text.

    Raises:
        RequestError: There is no such setting, or a value has another type or is outside its range; nothing is converted.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check_counts()
        check_number("temperature", self.temperature, low=0, high=_HIGHEST, rule="must be a finite number >= 0; 0 is greedy")
        check_number("top_p", self.top_p, low=_ABOVE_ZERO, high=1, rule="must be in (0, 1]; 1 keeps every token")
        check_number("min_p", self.min_p, low=0, high=1, rule="must be in [0, 1]; 0 keeps every token")
        rule = "must be a finite number > 0; 1 changes nothing"
        check_number("repetition_penalty", self.repetition_penalty, low=_ABOVE_ZERO, high=_HIGHEST, rule=rule)
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), low=-2, high=2, rule="must be in [-2, 2]; 0 changes nothing")
        check_tokens("stop_token_ids", self.stop_token_ids, each="a stop token id")
        self._check_stops()
        for name in ("ignore_eos", "skip_special_tokens"):
            if type(value := getattr(self, name)) is not bool:
                raise RequestError(f"{name}={value!r} must be True or False")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < _GREEDY_BELOW

    @property
    def is_penalised(self) -> bool:
        """Whether tokens of the request so far change its logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_plain(self) -> bool:
        """Whether the token with the highest logit is taken and nothing else is told."""
        return self.is_greedy and not self.is_penalised and self.logprobs is None and self.min_new_tokens == 0

    def _check_counts(self) -> None:
        check_integer("max_new_tokens", self.max_new_tokens, low=1)
        check_integer("min_new_tokens", self.min_new_tokens, low=0)
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
        if self.top_k is not None:
            check_integer("top_k", self.top_k, low=1)
        if self.seed is not None:
            check_integer("seed", self.seed, low=0)
        check_integer("n", self.n, low=1)
        if self.n > _MAX_SAMPLES:
            raise RequestError(f"n={self.n} must be at most {_MAX_SAMPLES}")
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, low=0)
            if self.logprobs > _MAX_LOGPROBS:
                raise RequestError(f"logprobs={self.logprobs} must be at most {_MAX_LOGPROBS}")

    def _check_stops(self) -> None:
        if not isinstance(self.stop, tuple):
            raise RequestError(f"stop must be a tuple of texts such as ('END',), got {self.stop!r}")
        if len(self.stop) > _MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop)} texts; at most {_MAX_STOPS} are watched for")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= _MAX_STOP_LENGTH:
                raise RequestError(f"a stop text has 1 to {_MAX_STOP_LENGTH} characters, got {text!r}")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise RequestError(f"a stop text must be text that can be encoded, got {text!r}")
