"""However sequences are cut over ranks: every token once, and all ranks as busy."""

from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.topology.sequence import kept_rows, rows_per_block, split_tokens

PARTS = st.integers(1, 9)


@given(st.lists(st.integers(0, 60), max_size=8), PARTS)
def test_every_new_token_is_computed_once(counts: list[int], parts: int) -> None:
    shares = split_tokens(counts, parts=parts)
    assert len(shares) == parts
    found = [(span.sequence, token) for span in chain(*shares) for token in span.tokens]
    assert sorted(found) == [(sequence, token) for sequence, count in enumerate(counts) for token in range(count)]
    for share in shares:
        assert all(span.tokens for span in share)
        for span, after in pairwise(share):
            assert span.sequence < after.sequence or span.tokens.stop < after.tokens.start


@given(st.integers(0, 300), PARTS)
def test_the_ranks_have_as_much_attention_to_compute(count: int, parts: int) -> None:
    shares = split_tokens([count], parts=parts)
    tokens = [[token for span in share for token in span.tokens] for share in shares]
    assert max(map(len, tokens)) - min(map(len, tokens)) <= 1
    seen = [sum(token + 1 for token in own) for own in tokens]
    assert max(seen) - min(seen) <= 2 * count  # as much as two tokens see


@given(st.integers(0, 40), PARTS)
def test_single_tokens_are_spread(count: int, parts: int) -> None:
    sizes = [len(share) for share in split_tokens([1] * count, parts=parts)]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 70), PARTS)
def test_every_token_of_a_block_is_kept_once(page_size: int, parts: int) -> None:
    kept = [kept_rows(page_size, part=part, parts=parts) for part in range(parts)]
    assert sorted(chain(*kept)) == list(range(page_size))
    assert max(map(len, kept)) == rows_per_block(page_size, parts=parts)
    assert max(map(len, kept)) - min(map(len, kept)) <= 1
    assert all(place % parts == part and place // parts == row for part, own in enumerate(kept) for row, place in enumerate(own))
