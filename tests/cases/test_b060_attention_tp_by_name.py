"""B060: with attention-dp on, nothing reduces over ranks that hold other tokens; "tp" is attention's group, by name."""

from pathlib import Path
from typing import TypeAlias

import pytest

from parallel_runtime.config import ParallelConfig, named_groups
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError
from parallel_runtime.launch import run_threads
from parallel_runtime.testing.checkpoints import tiny_moe_config, write_safetensors_checkpoint
from tests.spmd.replicas import Replicas
from tests.spmd.tiny_models import PROMPTS, greedy_reference
from tests.unit.layers.ranks import sizes_of

pytestmark = pytest.mark.timeout(30)

SPLITS = tuple(
    ParallelConfig.from_sglang(tp_size=tp_size, dp_size=2, enable_dp_attention=True, ep_size=ep_size)
    for tp_size, ep_size in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
)
Heard: TypeAlias = list[tuple[str, str, tuple[int, ...]]]
PEER_TO_PEER = ("send", "recv")
UNEQUAL = ("all_gatherv", "all_to_allv", "reduce_scatterv")  # whose shapes differ between members by design


def collectives(ctx: ParallelContext) -> dict[tuple[int, ...], Heard]:
    """What this rank recorded on each of its groups, by the ranks of the group; equal groups share a record."""
    heard: dict[tuple[int, ...], Heard] = {}
    for group in ctx.groups().values():
        heard[group.ranks] = [
            (record.group, record.operation, () if record.operation in UNEQUAL else record.shape)
            for record in group.recent(256)
            if not any(word in record.operation for word in PEER_TO_PEER)
        ]
    return heard


@pytest.mark.parametrize("parallel", SPLITS, ids=sizes_of)
def test_b060_members_of_every_group_record_the_same(parallel: ParallelConfig, tmp_path: Path) -> None:
    model = write_safetensors_checkpoint(tmp_path / "model", tiny_moe_config(shared=True, eos_ids=()))
    recorded: dict[int, dict[tuple[int, ...], Heard]] = {}

    def note(ctx: ParallelContext) -> None:
        recorded[ctx.rank] = collectives(ctx)

    with Replicas(model, parallel, at_end=note) as replicas:
        assert replicas.generate(PROMPTS[1], new=3) == greedy_reference(model, PROMPTS[1:2], 3)  # to DP part 0 alone
    assert replicas.failure is None
    assert recorded.keys() == set(range(parallel.world_size))
    for rank, heard in recorded.items():
        for ranks, sequence in heard.items():
            for member in ranks:
                assert recorded[member][ranks] == sequence, f"ranks {rank} and {member} in {ranks}"
        summed_over = {group for sequence in heard.values() for group, operation, _ in sequence if operation == "all_reduce_"}
        assert {group.split("#")[0] for group in summed_over} == ({"tp"} if parallel.tp > 1 else set())


def test_b060_tp_is_the_attention_group_and_the_other_one_has_another_name() -> None:
    parallel = SPLITS[0]
    assert parallel.layout.groups("tp") == ((0,), (1,))
    theirs = named_groups(parallel, "sglang")
    assert theirs["tp"] == parallel.layout.groups("stage") == ((0, 1),)
    assert theirs["attn_tp"] == parallel.layout.groups("tp")

    def ask(ctx: ParallelContext) -> tuple[tuple[int, ...], str]:
        with pytest.raises(ArgumentError, match="no group is called 'global_tp'"):
            ctx.group("global_tp")
        return ctx.tp.ranks, ctx.stage.name

    assert run_threads(ask, parallel) == [((0,), "stage#0"), ((1,), "stage#0")]
