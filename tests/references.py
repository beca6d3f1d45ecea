"""What ``transformers`` says about the embedded model, asked once for all tests; tests without it import nothing for it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["NEW", "TEXTS", "Reference", "ask_transformers"]

NEW = 32
TEXTS = (
    "The",
    "Once upon a time, there was",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Water boils at 100 degrees Celsius because the",
    "In 2024,   prices rose by 12.5%",
    "In the beginning of the twentieth century, physicists believed that light travelled through a medium which they called the",
    "Question: What do a tensor, a pipeline and a data parallel rank have in common? Explain it in your own words, slowly and "
    "with an example that a child would understand.\nAnswer:",
)
_GUESSES = (
    "29 1195 29 6693 29 271 29 81 29 6693 29 1714 29 86 403 37744 "
    "29 12609 29 8320 29 12420 982 29 13671 29 1141 29 1425 29 11527 29",
    "253 1165 3102 32047 281 260 1911 282 253 14055 2240 30 378 3102 436 1343 "
    "327 624 8685 6600 284 11908 28 351 253 16254 11908 24626 3365 3906 4075 617",
    "7042 30 198 198 504 2988 314 42 216 34 32 33 40 29 32 33 29 34 34 216 33 34 42 33 34 42 37 35 30 2 198 1",
    "198 19 12066 6486 42 198 3272 24 38572 46477 24 33 32 1292 216 907 "
    "21367 42 216 35 35 198 3272 24 38572 46477 24 33 32 1292 216 907",
    "913 314 805 216 33 32 32 21 913 30 198 198 504 913 281 253 216 33 32 32 29 18627 20590 24794 314 216 33 32 32 21 913 30",
    "288 1885 33 30 34 37 4533 28 253 216 33 30 37 21 2081 429 216 34 32 34 35 30 669 2063 314 8406 411 260 7191 29 33 41",
    "476 60 6589 5641 18 355 476 60 6589 5641 18 365 60 6589 25 284 "
    "338 357 436 1135 614 282 5469 30 198 198 504 2359 282 253 5641 436",
    "2 198 1 520 9531 198 49 13104 314 253 7132 1569 338 11473 2701 2966 "
    "284 4261 30 657 506 253 970 288 1880 1784 940 281 253 12633 284 3758",
)
"""Ids that follow each of ``TEXTS``. ``transformers`` confirms them at once, or says them itself, one after the other."""


@dataclass(frozen=True)
class Reference:
    """About each of ``TEXTS``: its ids, the logits of each of them, and the ``NEW`` greedy tokens that follow."""

    prompts: tuple[tuple[int, ...], ...]
    logits: tuple[Tensor, ...]
    tokens: tuple[tuple[int, ...], ...]


def ask_transformers() -> Reference:
    """Let ``transformers`` read the same file, with code of its own, and continue the texts on one rank in float32.

    A token is the greedy one where those before it are, so one pass over a text and its guess tells whether all of them are.
    """
    import transformers

    from parallel_runtime.models import load_tokenizer, open_checkpoint, resolve_model

    path = resolve_model("smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    prompts = tuple(tuple(tokenizer.encode(text)) for text in TEXTS)
    logits, tokens = [], []
    with torch.inference_mode():
        for prompt, guess in zip(prompts, _GUESSES, strict=True):
            guessed = tuple(map(int, guess.split()))
            seen = model(torch.tensor([prompt + guessed[:-1]])).logits[0]
            logits.append(seen[: len(prompt)])
            greedy = tuple(seen[len(prompt) - 1 :].argmax(dim=-1).tolist())
            tokens.append(greedy if greedy == guessed else _continue(model, prompt))
    return Reference(prompts=prompts, logits=tuple(logits), tokens=tuple(tokens))


def _continue(model: Any, prompt: tuple[int, ...]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(out[0, len(prompt) :].tolist())
