"""Agreeing that all is well: one rank's failure is the same error on all of them."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from parallel_runtime.comm import hash_store
from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.context.agreement import Agreement
from parallel_runtime.errors import ArgumentError, PeerError, PeerFailedError, PeerLostError, PeerTimeoutError
from parallel_runtime.launch import run_threads

pytestmark = pytest.mark.timeout(60)

WAYS = pytest.mark.parametrize(("backend", "shm"), [("local", "auto"), ("gloo", "auto"), ("gloo", "off")])


def config_of(backend: str, shm: str, *, size: int = 2) -> ParallelConfig:
    return ParallelConfig.model_validate({"tp": size, "backend": backend, "shm": shm})


def raise_on(ctx: ParallelContext, rank: int, error: BaseException) -> None:
    if ctx.rank == rank:
        raise error


def guarded(ctx: ParallelContext, body: Callable[[], object]) -> None:
    with ctx.guard():
        body()


@WAYS
def test_a_failure_in_a_guarded_block_is_raised_on_every_rank(backend: str, shm: str) -> None:
    def body(ctx: ParallelContext) -> None:
        for round_ in range(4):
            victim = round_ % ctx.world_size
            with pytest.raises(PeerFailedError, match=rf"^rank {victim} failed: ValueError: boom-{round_}$") as caught:
                guarded(ctx, lambda: raise_on(ctx, victim, ValueError(f"boom-{round_}")))  # noqa: B023  # called at once
            assert caught.value.ranks == (victim,)
            assert isinstance(caught.value.__cause__, ValueError) == (ctx.rank == victim)
            with ctx.guard():
                pass
            assert ctx.tp.all_reduce(torch.ones(1)).item() == ctx.world_size  # the groups are as usable as before

    run_threads(body, config_of(backend, shm, size=3), timeout_s=50)


@WAYS
def test_an_operation_that_waits_for_a_failed_rank_ends(backend: str, shm: str) -> None:
    def body(ctx: ParallelContext) -> float:
        start = time.monotonic()

        def use() -> None:
            raise_on(ctx, 1, ValueError("boom-42"))
            ctx.tp.all_reduce(torch.ones(1))

        with pytest.raises(PeerFailedError, match="rank 1 failed: ValueError: boom-42") as caught:
            guarded(ctx, use)
        assert (str(caught.value).startswith("tp#0 seq 1 all_reduce(float32[1]): rank 1")) == (ctx.rank == 0)
        return time.monotonic() - start

    assert max(run_threads(body, config_of(backend, shm), timeout_s=50)) < 10


def test_agree_says_why() -> None:
    def body(ctx: ParallelContext) -> None:
        ctx.agree(True)
        with pytest.raises(PeerFailedError, match=r"^rank 1 failed: no room$"):
            ctx.agree(ctx.rank != 1, "no room")
        with pytest.raises(PeerFailedError, match=r"^rank 2 failed: it did not say why$"):
            ctx.agree(ctx.rank != 2)
        ctx.agree(True)
        if ctx.rank < 2:
            ctx.agree(True, group=ctx.group("tp"))
            for wrong in (0, float("inf"), True):
                with pytest.raises(ArgumentError, match=f"timeout_s={wrong} must be a number of seconds above 0"):
                    ctx.agree(True, timeout_s=wrong)

    run_threads(body, ParallelConfig(tp=2, dp=2), timeout_s=50)


def test_a_rank_that_does_not_come_is_named_with_its_place() -> None:
    over = threading.Event()

    def body(ctx: ParallelContext) -> None:
        if ctx.rank == 1:
            assert over.wait(30)
            return
        with pytest.raises(
            PeerTimeoutError, match=r"world#0 seq 1 agree\(\) waited [\d.]+ s for rank 1 of \[0, 1\](.|\n)*in body"
        ):
            ctx.agree(True, timeout_s=0.6)
        over.set()

    run_threads(body, ParallelConfig(tp=2), timeout_s=50)


@WAYS
def test_a_rank_that_leaves_instead_is_named(backend: str, shm: str) -> None:
    def body(ctx: ParallelContext) -> str:
        try:
            with ParallelContext(ctx.config, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as inner:
                if inner.rank == 1:
                    raise KeyError("boom-42")
                inner.agree(True)
        except PeerLostError as error:
            return str(error)
        except KeyError:
            pass
        return ""

    told = run_threads(body, config_of(backend, shm), timeout_s=50)[0]
    assert "agree() lost rank 1 of [0, 1]" in told
    assert "KeyError: 'boom-42'" in told


def test_errors_that_blame_a_peer_or_end_the_program_stay_what_they_are() -> None:
    def body(ctx: ParallelContext) -> None:
        raised = (PeerLostError("gone"), SystemExit(3), KeyboardInterrupt())
        for error in raised:
            with pytest.raises((type(error), PeerFailedError)) as caught:
                guarded(ctx, lambda: raise_on(ctx, 1, error))  # noqa: B023  # called at once
            assert isinstance(caught.value, PeerFailedError) == (ctx.rank == 0)

    run_threads(body, ParallelConfig(tp=2), timeout_s=50)


def test_alone_there_is_nobody_to_agree_with() -> None:
    with ParallelContext(ParallelConfig()) as ctx:
        ctx.agree(True)
        with pytest.raises(PeerFailedError, match="rank 0 failed: no room"):
            ctx.agree(False, "no room")
        with pytest.raises(PeerFailedError, match="rank 0 failed: ValueError: boom"), ctx.guard():
            raise ValueError("boom")


def test_agreements_leave_nothing_behind() -> None:
    def body(ctx: ParallelContext) -> None:
        for _ in range(20):
            ctx.agree(True)
        ctx.world.barrier()
        assert ctx.store is not None
        keys = [key for key in ctx.store.list_keys() if "/agree/" in key]
        assert len(keys) <= 2 * ctx.world_size
        ctx.world.barrier()

    run_threads(body, ParallelConfig(tp=2), timeout_s=50)


def test_guard_and_deadline_work_with_the_configs_own() -> None:
    def body(ctx: ParallelContext) -> None:
        if ctx.rank == 0:
            with pytest.raises(PeerError, match="agree"):
                ctx.agree(True)

    run_threads(body, ParallelConfig(tp=2, deadlines=Deadlines(control_s=0.3)), timeout_s=50)


def test_a_mark_without_its_reason_yet_is_no_answer_and_comes_before_the_reason() -> None:
    said: list[str] = []

    class Slow:
        """A room in which the failing rank stops between its two words."""

        def set(self, key: str, value: str) -> None:
            said.append(key)

    agreement = Agreement(None, None, "world", (0, 1), 1)
    agreement._number = 1
    agreement._tell(Slow(), "boom")  # type: ignore[arg-type]  # only set is used
    assert said == ["1/failed", "1/1"]
    room = hash_store()
    room.set("1/failed", "boom")
    room.set("1/0", "-")
    assert agreement._failure(room, 1) is None
    room.set("1/1", "boom")
    assert "rank 1 failed: boom" in str(agreement._failure(room, 1))
