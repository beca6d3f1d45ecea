"""The embedded model equals ``transformers``, which reads the same file with code of its own."""

import pytest
import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.models import SlotKvCache, Tokenizer, load_model, load_tokenizer, open_checkpoint, resolve_model
from tests.references import TEXTS, Reference
from tests.unit.layers.ranks import on_ranks

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

TEXT_NUMBERS = (2, 3, 5)
"""Enough of ``TEXTS`` for a batch."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with open_checkpoint("smollm2") as checkpoint:
        return load_tokenizer(checkpoint)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_logits_and_greedy_tokens_equal_transformers(tp: int, smollm2_reference: Reference) -> None:
    prompts = [torch.tensor(smollm2_reference.prompts[number]) for number in TEXT_NUMBERS]

    def run(group: GroupCoordinator) -> tuple[list[Tensor], list[list[int]]]:
        with open_checkpoint("smollm2") as checkpoint:
            stages = [load_model(checkpoint, tp=group, layers=layers) for layers in (range(17), range(17, 30))]
        caches = [
            SlotKvCache(num_layers=len(s.layers), num_kv_heads=s.num_kv_heads, head_dim=s.head_dim, num_slots=3, max_length=64)
            for s in stages
        ]

        def forward(tokens: list[Tensor], starts: list[int]) -> Tensor:
            counts = [len(part) for part in tokens]
            hidden = torch.cat(tokens)
            positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
            for stage, cache in zip(stages, caches, strict=True):
                hidden = stage(hidden, positions, cache.step([0, 1, 2], counts))
            return hidden

        with torch.inference_mode():
            lengths = [len(prompt) for prompt in prompts]
            hidden = forward(prompts, [0, 0, 0])
            logits = list(torch.split(stages[-1].logits(hidden), lengths))
            last = stages[-1].greedy(hidden[torch.tensor(lengths).cumsum(0) - 1])
            chosen = [last]
            for step in range(3):
                hidden = forward([token.view(1) for token in chosen[-1]], [length + step for length in lengths])
                chosen.append(stages[-1].greedy(hidden))
        return logits, torch.stack(chosen, dim=1).tolist()

    for logits, greedy in on_ranks(tp, run):
        for number, mine, chosen in zip(TEXT_NUMBERS, logits, greedy, strict=True):
            assert (mine - smollm2_reference.logits[number]).abs().max() < 1e-3
            assert tuple(chosen) == smollm2_reference.tokens[number][:4]


def test_the_tokenizer_cuts_as_smollm2_was_taught(tokenizer: Tokenizer) -> None:
    """The text and ids of the published tokenizer: digits one by one, blanks before a number kept together."""
    cut = [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.encode("it's   1234\n\n  x<|im_end|>")]
    assert cut == ["it", "'s", "   ", "1", "2", "3", "4", "\n\n ", " x", "<|im_end|>"]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), 49152)


def test_the_tokenizer_agrees_with_transformers_where_no_blanks_precede_a_digit(tokenizer: Tokenizer) -> None:
    import transformers

    path = resolve_model("smollm2")
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in (*TEXTS[:4], "žluťoučký kůň 日本語 😀\t\r\n", "<|im_start|>x<|im_end|> don't CAN'T 3.14"):
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_a_chat_opens_the_models_turn(tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(tokenizer.chat([{"role": "user", "content": "hi"}]), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
