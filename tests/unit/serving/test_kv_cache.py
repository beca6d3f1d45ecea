"""The paged cache against the plain one, on blocks in any order."""

import pytest
import torch

from parallel_runtime.models.kv_cache import SlotKvCache
from parallel_runtime.serving.batch import Batch, Chunk
from parallel_runtime.serving.kv_cache import PagedKvCache
from parallel_runtime.serving.sampling_params import SamplingParams

LAYERS, K, H, D = 2, 2, 4, 8


def make_chunk(name: str, start: int, count: int, blocks: tuple[int, ...]) -> Chunk:
    return Chunk(
        request_id=name,
        arrival=0,
        start=start,
        token_ids=(0,) * count,
        blocks=blocks,
        is_sampled=True,
        sampling=SamplingParams(),
    )


def test_pages_in_any_order_give_what_one_slot_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    paged = PagedKvCache(num_layers=LAYERS, num_kv_heads=K, head_dim=D, num_blocks=9, page_size=4)
    paged.keys.fill_(torch.nan)
    paged.values.fill_(torch.nan)
    slots = SlotKvCache(num_layers=LAYERS, num_kv_heads=K, head_dim=D, num_slots=2, max_length=40)
    scattered, run = (7, 1, 4, 0), (2, 3)
    steps = [[(0, 5), (0, 3)], [(5, 4), (3, 1)], [(9, 1), (4, 3)], [(10, 5)]]
    for step in steps:
        chunks = [make_chunk(str(index), start, count, (scattered, run)[index]) for index, (start, count) in enumerate(step)]
        total = sum(count for _, count in step)
        attention = paged.step(Batch(chunks=tuple(chunks)))
        reference = slots.step(range(len(step)), [count for _, count in step])
        for layer in range(LAYERS):
            q, k, v = (torch.randn(total, heads, D, generator=generator) for heads in (H, K, K))
            out = attention.attend(layer, q, k, v)
            assert out.is_contiguous()
            assert torch.allclose(out, reference.attend(layer, q, k, v), atol=1e-6)


def test_single_tokens_are_attended_to_together_whatever_their_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (9, 2, 5, 8, 1)
    paged = PagedKvCache(num_layers=1, num_kv_heads=K, head_dim=D, num_blocks=20, page_size=4)
    paged.keys.fill_(torch.nan)
    paged.values.fill_(torch.nan)
    slots = SlotKvCache(num_layers=1, num_kv_heads=K, head_dim=D, num_slots=5, max_length=20)
    blocks = [tuple(range(index, 20, 5)) for index in range(5)]
    steps = [[(0, length) for length in lengths], [(length, 1) for length in lengths]]
    steps.append([(lengths[0] + 1, 3), *((length + 1, 1) for length in lengths[1:])])
    for step in steps:
        chunks = [make_chunk(str(index), start, count, blocks[index]) for index, (start, count) in enumerate(step)]
        q, k, v = (torch.randn(sum(count for _, count in step), heads, D, generator=generator) for heads in (H, K, K))
        out = paged.step(Batch(chunks=tuple(chunks))).attend(0, q, k, v)
        expected = slots.step(range(5), [count for _, count in step]).attend(0, q, k, v)
        assert torch.allclose(out, expected, atol=1e-6)


def test_a_run_of_blocks_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedKvCache(num_layers=1, num_kv_heads=K, head_dim=D, num_blocks=4, page_size=4)
    monkeypatch.setattr(PagedKvCache, "gather", lambda *_: pytest.fail("copied"))
    q, k, v = (torch.randn(6, heads, D) for heads in (H, K, K))
    cache.step(Batch(chunks=(make_chunk("a", 0, 6, (1, 2)),))).attend(0, q, k, v)
    cache.step(Batch(chunks=(make_chunk("a", 6, 1, (1, 2)),))).attend(0, q[:1], k[:1], v[:1])
    with pytest.raises(pytest.fail.Exception, match="copied"):
        cache.step(Batch(chunks=(make_chunk("a", 6, 1, (2, 1)),))).attend(0, q[:1], k[:1], v[:1])
