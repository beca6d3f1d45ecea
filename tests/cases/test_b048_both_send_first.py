"""B048: two neighbours send first and wait for each other."""

import random

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import PeerError
from tests.spmd.worlds import MAKERS, World

KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))


@KINDS
@pytest.mark.parametrize("world_size", [2, 3])
def test_b048_exchange_sends_both_ways(kind: str, world_size: int) -> None:
    def body(group: GroupCoordinator) -> float:
        got = group.exchange(torch.full((4 << 20,), float(group.rank_in_group)))
        return got[-1].item()

    assert World(kind)(world_size, body) == [(member - 1) % world_size for member in range(world_size)]


@KINDS
@pytest.mark.parametrize("world_size", [2, 3])
def test_b048_requests_activations_and_tokens_side_by_side(kind: str, world_size: int) -> None:
    """Requests as objects and activations flow down the pipeline; sampled tokens flow back to the first stage."""
    rng = random.Random(7)
    lengths = [rng.randint(1, 300) for _ in range(30)]

    def body(group: GroupCoordinator) -> None:
        for step, length in enumerate(lengths):
            if group.is_first_rank:
                group.send_object({"step": step, "prompt": list(range(2000))}, tag=1)
                group.isend_tensor_dict({"hidden": torch.full((length, 8), float(step))}, tag=2)
                if step:
                    assert group.recv_object(tag=3) == [step - 1]
                continue
            request = group.recv_object(tag=1)
            hidden = group.recv_tensor_dict(tag=2)["hidden"]
            assert (request["step"], hidden.shape[0], hidden[0, 0].item()) == (step, length, step)
            if group.is_last_rank:
                group.send_object([step], tag=3)
            else:
                group.send_object(request, tag=1)
                group.isend_tensor_dict({"hidden": hidden}, tag=2)
        if group.is_first_rank:
            assert group.recv_object(tag=3) == [len(lengths) - 1]

    World(kind)(world_size, body)


@KINDS
def test_b048_two_blocking_sends_end_in_an_error_that_names_the_peer(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        with pytest.raises(PeerError, match=r"send\(float32\[2\]\).*(member|rank) \d"):
            group.send(torch.ones(2), timeout_s=1)

    World(kind)(2, body)
