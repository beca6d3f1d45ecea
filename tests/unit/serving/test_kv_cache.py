"""The paged cache against the plain one, on blocks in any order."""

import torch

from parallel_runtime.models.kv_cache import SlotKvCache
from parallel_runtime.serving.kv_cache import PagedKvCache
from parallel_runtime.serving.messages import SamplingParams
from parallel_runtime.serving.policy import Batch, Chunk

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


def test_a_run_of_blocks_is_read_in_place() -> None:
    cache = PagedKvCache(num_layers=1, num_kv_heads=K, head_dim=D, num_blocks=4, page_size=4)
    step = cache.step(Batch(chunks=(make_chunk("a", 0, 6, (1, 2)),)))
    (sequence,) = step._sequences  # type: ignore[attr-defined]  # the view is what is tested
    view = sequence.read(cache.keys[0])
    assert view.shape == (K, 6, D)
    assert view.data_ptr() == cache.keys[0, 4].data_ptr()
