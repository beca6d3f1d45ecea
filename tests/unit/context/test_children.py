"""Contexts inside contexts: what they share, in which order they close, and who goes on after a failure."""

import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch

from parallel_runtime.comm.c10d import hash_store
from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.config.environment import Identity
from parallel_runtime.context import ContextState, ParallelContext
from parallel_runtime.errors import ArgumentError, ConfigError, ContextStateError, PeerError, RankFailedError, RendezvousError
from parallel_runtime.launch import run_threads
from parallel_runtime.terms import Rank

BACKENDS = pytest.mark.parametrize("backend", ["local", "shm", "gloo"])


def world(size: int, backend: str = "local", **settings: object) -> ParallelConfig:
    own = {"backend": "local"} if backend == "local" else {"backend": "gloo", "shm": "on" if backend == "shm" else "off"}
    return ParallelConfig.model_validate({"tp": size, **own, **settings})


def kind_of(ctx: ParallelContext) -> str:
    """What ``world`` was told."""
    return "shm" if ctx.config.shm == "on" else ctx.config.backend


def use_until_it_fails(context: ParallelContext) -> None:
    for _ in range(100):
        context.world.barrier()


def total(context: ParallelContext, value: float = 1.0) -> float:
    return context.world.all_reduce(torch.tensor(value)).item()


@BACKENDS
def test_a_child_is_another_topology_over_the_same_world(backend: str) -> None:
    def work(ctx: ParallelContext) -> None:
        with ctx.derive(world(1, backend, pp=2, dp=-1), name="draft") as child:
            assert child.parent is ctx
            assert ctx.parent is None
            assert (child.config.dp, child.rank, child.world_size) == (2, ctx.rank, 4)
            assert child.uid != ctx.uid
            assert child.pp.name == f"draft.pp#{ctx.rank % 2}"
            assert total(child) == total(ctx) == 4.0
            assert child.pp.all_reduce(torch.tensor(10.0**ctx.rank)).item() == sum(10.0**rank for rank in child.pp.ranks)
        assert child.state is ContextState.CLOSED
        assert total(ctx) == 4.0

    run_threads(work, world(4, backend), timeout_s=60)


@BACKENDS
def test_a_child_shares_what_agrees_and_a_duplicate_shares_nothing(backend: str) -> None:
    def work(ctx: ParallelContext) -> None:
        with ctx.derive(ctx.config) as child, ctx.duplicate("second") as second:
            before = ctx.tp.recent(1)[-1:]
            child.tp.barrier()
            assert ctx.tp.recent(1) != before, "the child's operations run over the parent's connection"
            seen = ctx.tp.recent()
            second.tp.barrier()
            second.world.barrier()
            assert ctx.tp.recent() == seen
            assert len(second.tp.recent()) == 2, "aliases stay together in a duplicate"
            assert second.tp.name == "second.tp#0"

    run_threads(work, world(2, backend), timeout_s=60)


def test_other_options_are_not_shared() -> None:
    def work(ctx: ParallelContext) -> None:
        with ctx.derive(world(2, "gloo", shm="off")) as child:
            child.tp.barrier()
            assert ctx.tp.recent() == ()

    run_threads(work, world(2, "shm"), timeout_s=60)


@BACKENDS
def test_a_child_over_a_part_of_the_ranks(backend: str) -> None:
    def work(ctx: ParallelContext) -> float:
        mine = (0, 1) if ctx.rank < 2 else (3, 2)
        with ctx.derive(world(-1, backend), ranks=mine) as half:
            assert half.rank == ctx.rank
            assert half.tp.ranks == mine
            with half.derive(world(2, backend)) as same:
                assert same.tp.ranks == mine
            return total(half, 10.0**ctx.rank)

    assert run_threads(work, world(4, backend), timeout_s=60) == [11.0, 11.0, 1100.0, 1100.0]


def test_children_that_do_not_fit_are_refused() -> None:
    def work(ctx: ParallelContext) -> None:
        with pytest.raises(ConfigError, match=r"lives on ranks of its parent, \[0, 1\]; it cannot have \[2\]"):
            ctx.derive(world(2), ranks=(1, 2))
        with pytest.raises(ConfigError, match="given twice"):
            ctx.derive(world(1, rank_offset=1), ranks=(1,))
        with pytest.raises(ConfigError, match="world"):
            ctx.derive(world(3))
        if ctx.rank == 0:
            with pytest.raises(ConfigError, match=r"rank 0 of 2 cannot enter a config over ranks \[1\]"):
                ctx.derive(world(1), ranks=(1,)).__enter__()

    run_threads(work, world(2), timeout_s=60)


@BACKENDS
def test_three_deep_the_parent_closes_all_newest_first(backend: str) -> None:
    def work(ctx: ParallelContext) -> list[str]:
        closed: list[str] = []

        class Watch:
            def __init__(self, name: str) -> None:
                self.name = name

            def at(self, stage: object) -> None:
                if str(stage) == "closing":
                    closed.append(self.name)

            def connected(self, ranks: object, connection: object) -> object:
                return connection

        chain = [ctx.derive(world(2, backend)).__enter__()]
        chain.append(chain[0].duplicate("b").__enter__())
        chain.append(chain[1].derive(world(1, backend, pp=2)).__enter__())
        beside = chain[0].derive(world(2, backend)).__enter__()
        for name, context in zip("abcd", (*chain, beside), strict=True):
            context._probe = Watch(name)  # type: ignore[assignment]  # a probe that only listens
        assert total(chain[2]) == 2.0
        group = chain[2].pp
        chain[0].close()
        assert [context.state for context in chain] == [ContextState.CLOSED] * 3
        for context in (chain[1], chain[2], beside):
            with pytest.raises(ContextStateError, match="it closed with its parent"):
                _ = context.tp
        with pytest.raises(ContextStateError, match="closed"):
            group.barrier()
        assert total(ctx) == 2.0
        return closed

    assert run_threads(work, world(2, backend), timeout_s=60) == [["d", "c", "b", "a"]] * 2


def test_a_child_of_a_closed_parent_is_not_entered() -> None:
    with ParallelContext(ParallelConfig()) as ctx:
        late = ctx.derive(ParallelConfig())
    with pytest.raises(ContextStateError, match="derived from is closed"):
        late.__enter__()
    for make in (lambda: ctx.derive(ParallelConfig()), lambda: ctx.duplicate("x"), ctx.survivors):
        with pytest.raises(ContextStateError, match="is closed"):
            make()


def test_an_exception_in_the_parent_closes_the_child_without_waiting() -> None:
    def work(ctx: ParallelContext) -> None:
        with suppress(KeyError), ctx.derive(ctx.config) as outer:
            inner = outer.duplicate("inner").__enter__()
            raise KeyError
        assert inner.state is ContextState.CLOSED

    run_threads(work, world(2), timeout_s=60)


def test_children_of_pretended_ranks_are_pretended() -> None:
    with (
        ParallelContext(ParallelConfig(tp=4, backend="fake"), identity=Identity(rank=Rank(2), world_size=4)) as ctx,
        ctx.derive(ParallelConfig(pp=4)) as child,
    ):
        assert child.pp.rank_in_group == 2
        child.pp.barrier()


@BACKENDS
def test_parent_and_duplicate_in_two_threads(backend: str) -> None:
    def work(ctx: ParallelContext) -> list[float]:
        with ctx.duplicate("second") as second:
            sums: list[float] = []
            thread = threading.Thread(target=lambda: sums.extend(total(second, float(n)) for n in range(50)))
            thread.start()
            mine = [total(ctx, 100.0) for _ in range(50)]
            thread.join()
            assert mine == [200.0] * 50
            return sums

    assert run_threads(work, world(2, backend), timeout_s=60) == [[2.0 * n for n in range(50)]] * 2


def test_children_named_differently_are_refused() -> None:
    def work(ctx: ParallelContext) -> None:
        with ctx.duplicate(f"stream-{ctx.rank}"):
            pass

    with pytest.raises(RankFailedError, match=r"rank 1 on host .* has context=stream-1 where rank 0 .* has context=stream-0"):
        run_threads(work, world(2), timeout_s=60)


@BACKENDS
def test_survivors_go_on_three_times_in_a_row(backend: str) -> None:
    """Of four ranks one fails each time; the rest notice, agree and open a smaller world, until one is left."""

    def go_on(ctx: ParallelContext, ranks: Sequence[Rank], seen: list[tuple[int, ...]]) -> None:
        if len(ranks) == 1:
            return
        config = world(len(ranks), kind_of(ctx), ranks=tuple(ranks), deadlines=Deadlines(collective_s=20))
        with ParallelContext(config, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as smaller:
            assert total(smaller) == len(ranks)
            if ctx.rank == max(ranks):
                raise KeyError("this rank gives up")
            with pytest.raises(PeerError):
                use_until_it_fails(smaller)
            left = smaller.survivors()
            seen.append(left)
            for use in (lambda: smaller.derive(config), smaller.survivors, lambda: smaller.open_group("tp", "pp")):
                with pytest.raises(ContextStateError, match="gave up its groups"):
                    use()
            go_on(ctx, left, seen)

    def work(ctx: ParallelContext) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        with suppress(KeyError):
            go_on(ctx, tuple(Rank(rank) for rank in range(4)), seen)
        return seen

    found = run_threads(work, world(4, backend), timeout_s=90)
    assert found == [[(0, 1, 2), (0, 1), (0,)], [(0, 1, 2), (0, 1)], [(0, 1, 2)], []]


@BACKENDS
def test_who_counts_survivors_releases_those_that_wait_for_it(backend: str) -> None:
    """Rank 3 gives up, its tp peer 2 notices; rank 0 waits for rank 2 in dp, and must not wait on."""

    def work(ctx: ParallelContext) -> tuple[int, ...]:
        config = world(2, kind_of(ctx), dp=2, deadlines=Deadlines(collective_s=30))
        try:
            with ParallelContext(config, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as broken:
                if ctx.rank == 3:
                    raise KeyError
                group = broken.tp if ctx.rank == 2 else broken.dp
                with pytest.raises(PeerError):
                    group.barrier()
                return broken.survivors()
        except KeyError:
            return ()

    assert run_threads(work, world(2, backend, dp=2), timeout_s=15) == [(0, 1, 2), (0, 1, 2), (0, 1, 2), ()]


def test_a_silent_rank_does_not_survive() -> None:
    late = threading.Event()

    def work(ctx: ParallelContext) -> tuple[int, ...]:
        if ctx.rank == 2:
            late.wait(30)
            with pytest.raises(RendezvousError, match=r"ranks \[0, 1\] have gone on without rank 2"):
                ctx.survivors()
            return ()
        left = ctx.survivors(timeout_s=0.3)
        late.set()
        return left

    assert run_threads(work, world(3), timeout_s=60) == [(0, 1), (0, 1), ()]


def test_alone_one_survives() -> None:
    with ParallelContext(ParallelConfig()) as ctx:
        assert ctx.survivors() == (0,)
        with pytest.raises(ContextStateError, match="group is closed"):
            ctx.tp.barrier()


def keys_of(ctx: ParallelContext) -> list[str]:
    assert ctx.store is not None
    return sorted(ctx.store.list_keys())


@BACKENDS
@pytest.mark.parametrize("how", ["normal", "raise"])
def test_store_keys_are_back_where_they_were(backend: str, how: str) -> None:
    def work(ctx: ParallelContext) -> tuple[list[str], list[str]]:
        counts = []
        for _ in range(5):
            with (
                suppress(KeyError),
                ParallelContext(world(2, backend), identity=ctx.identity, store=ctx.store, hub=ctx.hub) as other,
            ):
                with other.derive(world(1, backend, pp=2)) as child:
                    child.open_group("tp", "pp").barrier()
                if how == "raise":
                    raise KeyError
            ctx.world.barrier()
            counts.append(keys_of(ctx))
            ctx.world.barrier()
        return counts[0], counts[-1]

    for first, last in run_threads(work, world(2, backend), timeout_s=60):
        assert last == first


def test_what_is_no_process_group_is_not_adopted() -> None:
    with pytest.raises(ArgumentError, match=r"expected a torch\.distributed process group, got HashStore"):
        ParallelContext.adopt(hash_store(), ParallelConfig())


@BACKENDS
@pytest.mark.parametrize("how", ["normally", "by an exception"])
def test_a_peer_that_leaves_only_the_child_is_noticed_at_once(backend: str, how: str) -> None:
    """Parent and child share their connections, which stay whole."""
    over = threading.Event()

    def work(ctx: ParallelContext) -> str:
        try:
            with suppress(KeyError), ctx.derive(ctx.config, name="draft") as child:
                child.tp.barrier()
                if ctx.rank == 1 and how == "by an exception":
                    raise KeyError("boom-42")
                if ctx.rank == 0:
                    child.tp.barrier()
        except PeerError as error:
            return f"{type(error).__name__} {error.ranks} {error}"
        finally:
            if ctx.rank == 0:
                over.set()
        assert over.wait(20)  # it stays in the parent
        return ""

    told, nothing = run_threads(work, world(2, backend, deadlines=Deadlines(collective_s=60)), timeout_s=40)
    assert told.startswith("PeerLostError (1,) draft.tp#0 seq 2 barrier() lost rank 1 of [0, 1]"), told
    assert ("has left the context normally" if how == "normally" else "by an exception: KeyError: 'boom-42'") in told
    assert nothing == ""


@BACKENDS
def test_a_rank_that_never_comes_to_the_child_because_it_left_the_parent_is_noticed_at_once(backend: str) -> None:
    def work(ctx: ParallelContext) -> str:
        config = world(2, backend, deadlines=Deadlines(join_s=60))
        with (
            suppress(KeyError),
            ParallelContext(config, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as outer,
        ):
            if ctx.rank == 1:
                raise KeyError("boom-42")
            with pytest.raises(RendezvousError) as caught:
                outer.duplicate("second").__enter__()
            return str(caught.value)
        return ""

    told = run_threads(work, world(2, backend), timeout_s=20)[0]
    assert told == "rank 1 has left (KeyError: 'boom-42')"


def test_a_family_answers_from_one_thread_and_one_socket() -> None:
    """Each context for itself: a child of one of them has its own operations and its own blame."""

    def work(ctx: ParallelContext) -> None:
        ctx.world.barrier()
        before = sum(thread.name == "parallel-runtime-monitor" for thread in threading.enumerate())
        ctx.world.barrier()
        with ctx.derive(ctx.config) as child, child.duplicate("second") as second:
            second.world.barrier()
            assert sum(thread.name == "parallel-runtime-monitor" for thread in threading.enumerate()) == before
            assert second._monitor is not None
            assert child._monitor is not None
            mine = [monitor.reports([1 - ctx.rank])[1 - ctx.rank] for monitor in (child._monitor, second._monitor)]
            groups = [{entry.group for entry in report.connections[0].tail} for report in mine]
            assert groups == [{"world#0"}, {"second.world#0"}]
            second.world.barrier()
        ctx.world.barrier()

    run_threads(work, world(2, "gloo"), timeout_s=30)


def test_survivors_of_a_context_give_up_the_groups_of_its_children_too() -> None:
    def body(ctx: ParallelContext) -> bool:
        with ctx.derive(ParallelConfig(dp=2), name="a") as child, child.duplicate("b") as grandchild:
            groups = (child.dp, grandchild.dp)
            assert ctx.survivors(20) == (0, 1)
            return any(group.is_open for group in groups)

    assert run_threads(body, ParallelConfig(tp=2, backend="local"), timeout_s=40) == [False, False]
