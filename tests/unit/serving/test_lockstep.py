"""Lock-step: where it is needed, and what the leaders agree on."""

from collections.abc import Sequence

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import run_threads
from parallel_runtime.serving.lockstep import Lockstep, Turn, needs_lockstep
from parallel_runtime.testing.checkpoints import tiny_llama_config, tiny_moe_config

pytestmark = pytest.mark.timeout(30)

RESTS = Turn(together=False, is_over=False)
COMPUTES = Turn(together=True, is_over=False)
LEAVES = Turn(together=False, is_over=True)


def test_only_experts_that_span_replicas_need_it() -> None:
    moe, dense = tiny_moe_config().shape, tiny_llama_config().shape
    spans = (
        ParallelConfig(dp=2, ep=2),
        ParallelConfig(dp=2, etp=2),
        ParallelConfig(tp=2, dp=2, ep=4),
        ParallelConfig(tp=2, dp=2, ep=2),
        ParallelConfig(tp=3, dp=2, ep=2, etp=1),  # the second pair crosses the border of the replicas
        ParallelConfig(tp=2, dp=2, ep=2, etp=1, order=("dp", "tp", "cp", "pp")),
    )
    stays = (
        ParallelConfig(tp=4, ep=4),
        ParallelConfig(tp=2, dp=2),
        ParallelConfig(tp=2, dp=2, ep=2, etp=1),
        ParallelConfig(dp=4),
        ParallelConfig(pp=2, dp=2),
    )
    assert all(needs_lockstep(parallel, moe) for parallel in spans)
    assert not any(needs_lockstep(parallel, moe) for parallel in stays)
    assert not any(needs_lockstep(parallel, dense) for parallel in (*spans, *stays))


def agree(*says: Sequence[tuple[bool, bool, int, bool]]) -> list[list[tuple[Turn, bool]]]:
    """What each leader hears, and whether it sleeps, after each of its turns (starts, is busy, told, leaves)."""

    def run(ctx: ParallelContext) -> list[tuple[Turn, bool]]:
        lockstep = Lockstep(ctx.dp)
        heard = []
        for starts, is_busy, told, leaves in says[ctx.rank]:
            turn = lockstep.agree(starts=starts, is_busy=is_busy, num_told=told, leaves=leaves)
            heard.append((turn, lockstep.is_asleep))
        return heard

    return run_threads(run, ParallelConfig(dp=len(says)))


def test_all_compute_if_one_does() -> None:
    first, second = agree([(True, True, 1, False)], [(False, False, 1, False)])
    assert first == second == [(COMPUTES, False)]


def test_nobody_sleeps_while_a_batch_or_a_message_is_under_way() -> None:
    busy, rest = (False, True, 1, False), (False, False, 1, False)
    assert agree([busy], [rest]) == [[(RESTS, False)]] * 2
    assert agree([(False, False, 2, False)], [rest]) == [[(RESTS, False)]] * 2
    assert agree([rest], [rest]) == [[(RESTS, True)]] * 2


def test_sleepers_do_not_communicate_until_they_are_told_more() -> None:
    rest, told = (False, False, 1, False), (True, True, 2, False)
    first, second = agree([rest, rest, rest, told], [rest, (False, False, 2, False)])
    assert first == [(RESTS, True), (RESTS, True), (RESTS, True), (COMPUTES, False)]
    assert second == [(RESTS, True), (COMPUTES, False)]


def test_all_leave_together() -> None:
    rest, leave = (False, False, 1, False), (False, False, 1, True)
    assert agree([leave, leave], [rest, leave]) == [[(RESTS, True), (LEAVES, True)]] * 2
    first, second = agree([rest, leave], [rest, rest, rest, leave])
    assert first[-1][0] == second[-1][0] == LEAVES
    assert [turn for turn, _ in second[:-1]] == [RESTS] * 3


def test_what_the_front_asks_is_done_by_all_in_the_same_turn() -> None:
    def run(ctx: ParallelContext) -> list[int]:
        lockstep = Lockstep(ctx.dp)
        pending = ([1, 2, 2], [0, 1, 2])[ctx.rank]
        return [
            lockstep.agree(starts=False, is_busy=True, num_told=9, leaves=False, num_controls=count).num_controls
            for count in pending
        ]

    assert run_threads(run, ParallelConfig(dp=2)) == [[0, 1, 2]] * 2
