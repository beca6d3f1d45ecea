"""The simple KV cache keeps to its slots."""

import pytest

from parallel_runtime.errors import ArgumentError
from parallel_runtime.models import SlotKvCache


def cache() -> SlotKvCache:
    return SlotKvCache(num_layers=1, num_kv_heads=1, head_dim=2, num_slots=2, max_length=4)


def test_a_sequence_cannot_outgrow_its_slot() -> None:
    slots = cache()
    slots.step([1], [3])
    with pytest.raises(ArgumentError, match="slot 1 has 3 tokens and would get 2 more; a slot holds 1 to 4"):
        slots.step([1], [2])
    slots.reset(1)
    slots.step([1], [4])


def test_a_slot_appears_once_in_a_step() -> None:
    with pytest.raises(ArgumentError, match=r"slots \[0, 0\] name a slot twice"):
        cache().step([0, 0], [1, 1])


def test_a_refused_step_changes_nothing() -> None:
    slots = cache()
    with pytest.raises(ArgumentError, match="slot 1 has 0 tokens and would get 5 more"):
        slots.step([0, 1], [1, 5])
    assert slots.lengths == [0, 0]
