"""The life of a context, with ranks as threads."""

import copy
import pickle
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel_runtime.comm.c10d import hash_store
from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.config.environment import Identity
from parallel_runtime.context import ContextState, ParallelContext
from parallel_runtime.context.connectors import Connection
from parallel_runtime.context.probe import Stage
from parallel_runtime.errors import (
    ArgumentError,
    CollectiveMismatchError,
    ConfigError,
    ContextStateError,
    PeerError,
    RankFailedError,
    RendezvousError,
)
from parallel_runtime.launch import run_threads
from parallel_runtime.terms import GROUP_NAMES, Rank


def again(ctx: ParallelContext, config: ParallelConfig) -> ParallelContext:
    """A further context of the same rank."""
    return ParallelContext(config, identity=ctx.identity, store=ctx.store, hub=ctx.hub)


def state_of(context: ParallelContext) -> str:
    return context.state.value


def test_a_context_goes_from_new_to_open_to_closed_once() -> None:
    context = ParallelContext(ParallelConfig())
    assert state_of(context) == ContextState.NEW
    with pytest.raises(ContextStateError, match="is new, so it has no groups; enter it"):
        _ = context.tp
    with pytest.raises(ContextStateError, match="does not know its rank yet"):
        _ = context.rank
    with context as ctx:
        assert ctx is context
        assert state_of(ctx) == ContextState.OPEN
        with pytest.raises(ContextStateError, match="entered once; this one is open"):
            ctx.__enter__()
        group = ctx.tp
    assert state_of(context) == ContextState.CLOSED
    context.close()
    for use in (lambda: context.tp, context.groups, lambda: context.open_group("tp", "dp")):
        with pytest.raises(ContextStateError, match="is closed, so it has no groups; make a new one"):
            use()
    with pytest.raises(ContextStateError, match="closed"):
        group.all_reduce(torch.ones(1))
    with pytest.raises(ContextStateError, match="entered once; this one is closed"):
        context.__enter__()
    assert (context.rank, context.world_size) == (0, 1)


def test_close_is_the_normal_exit() -> None:
    context = ParallelContext(ParallelConfig())
    context.__enter__()
    context.close()
    context.close()
    assert state_of(context) == ContextState.CLOSED


def test_facts_and_groups_of_every_rank() -> None:
    config = ParallelConfig(tp=2, pp=2, ep=2, checked=True)

    def look(ctx: ParallelContext) -> None:
        layout = config.layout
        assert ctx.coordinate == layout.coordinate(ctx.rank)
        assert (ctx.world_size, ctx.local_rank, ctx.layout, ctx.config) == (4, ctx.rank, layout, config)
        assert ctx.device == torch.device("cpu")
        assert ctx.plan == config.plan()
        assert f"rank={ctx.rank}, open" in repr(ctx)
        assert list(ctx.groups()) == list(GROUP_NAMES)
        for name, group in ctx.groups().items():
            assert group is ctx.group(name) is getattr(ctx, name)
            assert group.ranks == layout.group_of(ctx.rank, name)
            assert group.name == f"{name}#{layout.group_index(ctx.rank, name)}"
            total = group.all_reduce(torch.tensor(10.0**ctx.rank)).item()
            assert total == sum(10.0**rank for rank in group.ranks)
        with pytest.raises(ArgumentError, match="no group is called 'moe'; there are world, stage, tp"):
            ctx.group("moe")

    run_threads(look, config, timeout_s=60)


def test_torch_keeps_no_default_group() -> None:
    assert run_threads(lambda ctx: torch.distributed.is_initialized(), ParallelConfig(tp=2, backend="gloo")) == [False, False]


def test_keys_and_uids_are_never_reused() -> None:
    seen: list[tuple[str, frozenset[str]]] = []

    def look(ctx: ParallelContext) -> None:
        for _ in range(3):
            with again(ctx, ctx.config) as other:
                seen.append((other.uid, frozenset(group.key for group in other.groups().values())))

    run_threads(look, ParallelConfig(tp=2, dp=2), timeout_s=60)
    by_uid: dict[str, set[str]] = {}
    for uid, keys in seen:
        by_uid.setdefault(uid, set()).update(keys)
        assert all(uid in key for key in keys)
    assert [sum(uid == other for other, _ in seen) for uid in by_uid] == [4, 4, 4]


def test_contexts_entered_in_different_order_are_refused_not_mixed() -> None:
    configs = [ParallelConfig(tp=2), ParallelConfig(pp=2)]

    def cross(ctx: ParallelContext) -> None:
        first, second = configs if ctx.rank == 0 else configs[::-1]
        with again(ctx, first), again(ctx, second):
            pass

    with pytest.raises(RankFailedError, match=r"rank 1 on host .* has .*pp=2, tp=1 where rank 0 on host .* has .*pp=1, tp=2"):
        run_threads(cross, ParallelConfig(tp=2), timeout_s=60)


def test_a_failed_entry_leaves_a_closed_context() -> None:
    identity = Identity(rank=Rank(0), world_size=2)
    config = ParallelConfig(tp=2, deadlines=Deadlines(join_s=0.2))
    context = ParallelContext(config, identity=identity, store=hash_store())
    with pytest.raises(RendezvousError, match=r"1 of 2 ranks joined within 0\.2 s .*missing: 1"), context:
        pass
    assert state_of(context) == ContextState.CLOSED


def test_a_world_of_several_needs_a_place_to_meet() -> None:
    with pytest.raises(ConfigError, match="a world of 2 ranks has to meet somewhere"):
        ParallelContext(ParallelConfig(tp=2), identity=Identity(rank=Rank(0), world_size=2)).__enter__()


def test_a_foreign_store_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"torch\.distributed store"):
        ParallelContext(ParallelConfig(), store={})  # type: ignore[arg-type]  # what is tested


def test_local_threads_need_their_hub() -> None:
    config = ParallelConfig(tp=2, backend="local")
    with pytest.raises(ConfigError, match="run_threads"):
        ParallelContext(config, identity=Identity(rank=Rank(0), world_size=2), store=hash_store()).__enter__()


def test_pretended_ranks_meet_nobody() -> None:
    identity = Identity(rank=Rank(37), world_size=1024)
    with ParallelContext(ParallelConfig(tp=8, dp=128, backend="fake"), identity=identity) as ctx:
        assert ctx.tp.ranks == tuple(range(32, 40))
        assert ctx.tp.all_gather(torch.ones(2, 3), dim=0).shape == (16, 3)


def test_contexts_and_groups_stay_in_their_process() -> None:
    with ParallelContext(ParallelConfig()) as ctx:
        for copier in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(ContextStateError, match="contexts stay in their process"):
                copier(ctx)


def test_alone_no_socket_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    with ParallelContext(ParallelConfig()) as ctx:
        assert ctx.world.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_extra_groups(backend: str) -> None:
    def look(ctx: ParallelContext) -> float:
        group = ctx.open_group("tp", "dp")
        assert ctx.open_group("tp", "dp") is group
        assert group.ranks == ctx.layout.group_of(ctx.rank, "tp", "dp")
        assert ctx.open_group("cp").world_size == 1
        return group.all_reduce(torch.tensor(10.0**ctx.rank)).item()

    config = ParallelConfig.model_validate({"tp": 2, "dp": 2, "pp": 2, "backend": backend})
    assert run_threads(look, config, timeout_s=60) == [1111.0] * 4 + [11110000.0] * 4


def test_extra_groups_in_a_different_order_are_an_error_on_all() -> None:
    def cross(ctx: ParallelContext) -> None:
        axes = [("tp", "dp"), ("tp", "pp")] if ctx.rank != 1 else [("tp", "pp"), ("tp", "dp")]
        for pair in axes:
            ctx.open_group(*pair)

    with pytest.raises(RankFailedError, match=r"same order on every rank; as no\. 1, .*rank 1 opens tp\+pp") as caught:
        run_threads(cross, ParallelConfig(tp=2, dp=2, pp=2), timeout_s=60)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)


def test_an_extra_group_that_a_member_never_opens_ends_at_the_deadline() -> None:
    released = threading.Event()

    def skip(ctx: ParallelContext) -> None:
        if ctx.rank == 0:
            try:
                ctx.open_group("tp", "pp")
            finally:
                released.set()
        else:
            released.wait(30)

    config = ParallelConfig(tp=2, deadlines=Deadlines(join_s=0.3))
    with pytest.raises(RankFailedError, match=r"extra group 1: 1 of 2 ranks came within 0.3 s .*missing: 1"):
        run_threads(skip, config, timeout_s=60)


def test_leaving_by_an_exception_frees_those_that_wait() -> None:
    def leave(ctx: ParallelContext) -> str:
        try:
            with again(ctx, ctx.config) as inner:
                if inner.rank == 1:
                    raise KeyError("gone")
                inner.tp.barrier()
        except (KeyError, PeerError) as error:
            return type(error).__name__
        return "nothing"

    assert run_threads(leave, ParallelConfig(tp=2, backend="gloo"), timeout_s=60) == ["PeerLostError", "KeyError"]


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", ["local", "gloo"])
@pytest.mark.parametrize("error", [UnspeakableError(), ValueError("\ud800")])
def test_an_error_that_cannot_be_told_closes_everything_and_stays_itself(backend: str, error: Exception) -> None:
    def body(ctx: ParallelContext) -> None:
        inner = again(ctx, ctx.config)
        with pytest.raises(type(error)) as caught, inner:  # noqa: PT012  # the exit is what is tested
            group = inner.tp
            child = inner.derive(ctx.config).__enter__()
            raise error
        assert caught.value is error
        assert not group.is_open
        assert state_of(child) == ContextState.CLOSED
        assert inner.store is None
        ctx.tp.barrier()

    run_threads(body, ParallelConfig.model_validate({"tp": 2, "backend": backend}), timeout_s=50)
    with pytest.raises(RankFailedError, match=f"rank 0 of 2 failed in .*{type(error).__name__}"):
        run_threads(raiser(error), ParallelConfig.model_validate({"tp": 2, "backend": backend}), timeout_s=50)


def raiser(error: Exception) -> Callable[[ParallelContext], None]:
    def body(ctx: ParallelContext) -> None:
        if ctx.rank == 0:
            raise error
        with pytest.raises(PeerError):
            ctx.tp.barrier()

    return body


def test_an_error_that_cannot_be_told_while_entering_stays_itself() -> None:
    class Trip:
        def at(self, stage: Stage) -> None:
            if stage is Stage.OPENING:
                raise UnspeakableError

        def connected(self, ranks: tuple[Rank, ...], connection: Connection) -> Connection:
            return connection

    store = hash_store()

    def body(ctx: ParallelContext) -> None:
        inner = ParallelContext(ctx.config, identity=ctx.identity, store=store, hub=ctx.hub, probe=Trip())
        with pytest.raises(UnspeakableError), inner:
            pass
        assert inner.store is None

    run_threads(body, ParallelConfig(tp=2), timeout_s=50)


def test_a_child_that_fails_to_close_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ParallelContext(ParallelConfig())
    with pytest.raises(ValueError, match="boom-45"), context:  # noqa: PT012  # the exit is what is tested
        first, second = (context.derive(ParallelConfig()).__enter__() for _ in range(2))
        monkeypatch.setattr(second, "_depart", raise_boom)
        group = context.tp
    assert [state_of(first), state_of(second), state_of(context)] == [ContextState.CLOSED] * 3
    assert not group.is_open


def raise_boom() -> None:
    raise ValueError("boom-45")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"config": None}, r"config must be a ParallelConfig, got None \(NoneType\); use one such as ParallelConfig\(tp=2\)"),
        ({"config": {"tp": 2}}, r"config must be a ParallelConfig, got \{'tp': 2\} \(dict\)"),
        ({"identity": 5}, r"identity must be a Identity, got 5 \(int\); use Identity"),
        ({"hub": 5}, r"hub must be a LocalHub, got 5 \(int\)"),
    ],
)
def test_arguments_of_another_type_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        ParallelContext(**({"config": ParallelConfig()} | arguments))


def test_groups_are_asked_for_by_name() -> None:
    with ParallelContext(ParallelConfig()) as ctx:
        with pytest.raises(ArgumentError, match=r"no group is called \[\]; there are world"):
            ctx.group([])  # type: ignore[arg-type]  # what is tested
        with pytest.raises(ArgumentError, match=r"axis must be a str, got \['tp'\] \(list\)"):
            ctx.open_group(["tp"])  # type: ignore[arg-type]  # what is tested


class Gate:
    """Rank 1 finishes opening only once rank 0 means to close."""

    def __init__(self, rank: int, is_closing: threading.Event, has_left: threading.Event, events: list[str]) -> None:
        self._rank = rank
        self._is_closing = is_closing
        self._has_left = has_left
        self._events = events

    def at(self, stage: Stage) -> None:
        if self._rank == 0 and stage is Stage.CLOSING:
            self._is_closing.set()

    def connected(self, ranks: tuple[Rank, ...], connection: Connection) -> Connection:
        if self._rank == 1:
            assert self._is_closing.wait(30)
            self._has_left.wait(0.3)
            self._events.append("rank 1 has opened")
        return connection


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shm", ["on", "off"])
def test_a_rank_that_is_done_at_once_stays_until_its_peers_have_opened(shm: str) -> None:
    store, events = hash_store(), list[str]()
    is_closing, has_left = threading.Event(), threading.Event()

    def body(ctx: ParallelContext) -> None:
        probe = Gate(ctx.rank, is_closing, has_left, events)
        with ParallelContext(ctx.config, identity=ctx.identity, store=store, probe=probe):
            pass
        if ctx.rank == 0:
            events.append("rank 0 has left")
            has_left.set()

    run_threads(body, ParallelConfig.model_validate({"tp": 2, "backend": "gloo", "shm": shm}), timeout_s=50)
    assert events == ["rank 1 has opened", "rank 0 has left"]


@pytest.mark.timeout(60)
def test_a_rank_that_failed_to_open_holds_up_nobody() -> None:
    store = hash_store()

    class Trip:
        def at(self, stage: Stage) -> None:
            """Nothing happens here."""

        def connected(self, ranks: tuple[Rank, ...], connection: Connection) -> Connection:
            raise ValueError("boom-46")

    def body(ctx: ParallelContext) -> None:
        inner = ParallelContext(ctx.config, identity=ctx.identity, store=store, probe=Trip() if ctx.rank == 1 else None)
        if ctx.rank == 0:
            with inner:
                pass
        else:
            with pytest.raises(ValueError, match="boom-46"):
                inner.__enter__()

    config = ParallelConfig(tp=2, backend="gloo", deadlines=Deadlines(exit_s=1000))
    run_threads(body, config, timeout_s=50)
