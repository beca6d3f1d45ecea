"""A torch store as the small store that shared memory opens through."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from parallel_runtime.comm import hash_store
from parallel_runtime.comm.shm import ShmCommunicator
from parallel_runtime.comm.shm.stores import StoreAdapter


def test_values_cross_and_a_missing_key_is_a_timeout() -> None:
    adapter = StoreAdapter(hash_store())
    adapter.set("key", b"value")
    assert adapter.get("key", 1.0) == b"value"
    with pytest.raises(TimeoutError, match=r"the store had no 'other' after 0\.01 s"):
        adapter.get("other", 0.01)


def test_a_group_opens_over_a_torch_store() -> None:
    store = hash_store()
    with ThreadPoolExecutor(2) as pool:
        members = list(pool.map(lambda rank: ShmCommunicator.create(StoreAdapter(store), "k", rank, 2, 10.0), range(2)))
        assert all(isinstance(member, ShmCommunicator) for member in members)
        for member in members:
            assert isinstance(member, ShmCommunicator)
            member.close()
