"""What ``transformers`` says about the embedded model, asked once for all tests; tests without it import nothing for it."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Reference:
    """About each of ``TEXTS``: its ids, the logits of each of them, and the ``NEW`` greedy tokens that follow."""

    prompts: tuple[tuple[int, ...], ...]
    logits: tuple[Tensor, ...]
    tokens: tuple[tuple[int, ...], ...]


def ask_transformers() -> Reference:
    """Let ``transformers`` read the same file, with code of its own, and continue the texts on one rank in float32."""
    import transformers

    from parallel_runtime.models import load_tokenizer, open_checkpoint, resolve_model

    path = resolve_model("smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    prompts = tuple(tuple(tokenizer.encode(text)) for text in TEXTS)
    logits, tokens = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            logits.append(model(ids).logits[0])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                eos_token_id=None,
                pad_token_id=0,
            )
            tokens.append(tuple(out[0, len(prompt) :].tolist()))
    return Reference(prompts=prompts, logits=tuple(logits), tokens=tuple(tokens))
