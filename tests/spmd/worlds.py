"""Groups whose ranks are threads of the test process, over every communicator that can be had so.

A test takes the fixture ``world`` and calls ``world(world_size, body)``; ``body(group)`` runs on every rank, and the results come
back in rank order. To run every such test over another communicator, add its maker to ``MAKERS``.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from types import MappingProxyType
from typing import Final, TypeVar

import torch

from parallel_runtime.comm import (
    C10dCommunicator,
    Communicator,
    GroupCoordinator,
    GroupSpec,
    GroupTimeouts,
    LocalCommunicator,
    LocalHub,
    Store,
    gloo_device,
    hash_store,
    open_coordinator,
)
from parallel_runtime.comm.hierarchy import HierarchicalCommunicator, HostSplit
from parallel_runtime.comm.shm import ShmCommunicator, Unavailable
from parallel_runtime.terms import Rank

__all__ = ["EVERY_MAKER", "MAKERS", "Meeting", "RankError", "World"]

_T = TypeVar("_T")
_keys = count()


@dataclass(frozen=True)
class Meeting:
    """What the ranks of one world meet in."""

    hub: LocalHub
    store: Store


def _local(meeting: Meeting, key: str, ranks: Sequence[int], rank: int) -> Communicator:
    return LocalCommunicator(meeting.hub, key, ranks.index(rank), len(ranks), ranks=ranks)


def _gloo(meeting: Meeting, key: str, ranks: Sequence[int], rank: int, *, checked: bool = True) -> Communicator:
    place = (ranks.index(rank), len(ranks))
    return C10dCommunicator(meeting.store, key, *place, timeout_s=30, ranks=ranks, transport=gloo_device(), checked=checked)


class _FirstWords:
    """The store as shared memory wants it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes are taken, torch's stub says str

    def get(self, key: str, timeout_s: float) -> bytes:
        self._store.wait([key], timedelta(seconds=timeout_s))
        return self._store.get(key)


def _shm(meeting: Meeting, key: str, ranks: Sequence[int], rank: int) -> Communicator:
    made = ShmCommunicator.create(_FirstWords(meeting.store), key, ranks.index(rank), len(ranks), 30)
    if isinstance(made, Unavailable):
        raise RankError(f"this host cannot share memory: {made.reason}")
    return made


MAKERS: Final = MappingProxyType({"local": _local, "gloo": _gloo, "shm": _shm})
"""How one member of a group makes its communicator: ``maker(meeting, key, ranks, rank)``."""


def _hosts(meeting: Meeting, key: str, ranks: Sequence[int], rank: int) -> Communicator:
    """Two pretended hosts: one has the even ranks, the other one the odd ones."""
    split = HostSplit([other % 2 for other in ranks], ranks.index(rank))
    flat = _gloo(meeting, f"{key}/flat", ranks, rank)
    local = [ranks[member] for member in split.local]
    inside = _shm(meeting, f"{key}/{split.host}", local, rank) if len(local) > 1 else None
    return HierarchicalCommunicator(split, ranks.index(rank), flat=flat, inside=inside)


def _bare_gloo(meeting: Meeting, key: str, ranks: Sequence[int], rank: int) -> Communicator:
    """Without the roll call, in which all that is small would travel."""
    return _gloo(meeting, key, ranks, rank, checked=False)


EVERY_MAKER: Final = MappingProxyType({**MAKERS, "bare_gloo": _bare_gloo, "hosts": _hosts})
"""``MAKERS``, and what stands below and on them: too slow to run every test over it."""


class RankError(Exception):
    """A rank raised; its exception is the cause."""


class World:
    """Opens groups of one kind of communicator."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(
        self,
        world_size: int,
        body: Callable[[GroupCoordinator], _T],
        *,
        timeouts: GroupTimeouts | None = None,
        checked: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> list[_T]:
        """Run ``body`` on every rank of one group; ``ranks`` gives its order. Results are in group order."""
        order = tuple(range(world_size)) if ranks is None else tuple(ranks)
        return self.many(
            max(order) + 1,
            lambda rank: [order],
            lambda rank, groups: body(groups[0]),
            timeouts=timeouts,
            checked=checked,
            pick=order,
        )

    def many(
        self,
        world_size: int,
        groups_of: Callable[[int], Sequence[Sequence[int]]],
        body: Callable[[int, list[GroupCoordinator]], _T],
        *,
        timeouts: GroupTimeouts | None = None,
        checked: bool = False,
        pick: Sequence[int] | None = None,
    ) -> list[_T]:
        """Run ``body(rank, its groups)`` on every rank. ``groups_of(rank)`` lists the groups, in one order on their members."""
        meeting = Meeting(LocalHub(world_size), hash_store())
        run = next(_keys)
        results: dict[int, _T] = {}
        errors: dict[int, BaseException] = {}
        members = tuple(pick or range(world_size))
        all_open = threading.Barrier(len(members))  # gloo cannot open with a member that has left again

        def rank_main(rank: int) -> None:
            opened: list[GroupCoordinator] = []
            try:
                for ranks in groups_of(rank):
                    if rank in ranks:
                        opened.append(
                            self._open(meeting, f"w{run}/{'-'.join(map(str, ranks))}", tuple(ranks), rank, timeouts, checked)
                        )
                all_open.wait(60)
                results[rank] = body(rank, opened)
            except BaseException as exc:
                errors[rank] = exc
                all_open.abort()
            finally:
                for group in opened:
                    group.close(grace_s=0.0 if rank in errors else 10.0)
                meeting.hub.leave(rank)

        threads = [threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}") for rank in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
            if thread.is_alive():
                raise RankError(f"{thread.name} hangs; errors so far: {errors}")
        followed = ("PeerLostError", "BrokenBarrierError")
        for rank, error in sorted(errors.items(), key=lambda item: type(item[1]).__name__ in followed):
            raise RankError(f"rank {rank} raised {type(error).__name__}: {error}; all: {errors}") from error
        return [results[rank] for rank in members]

    def _open(
        self, meeting: Meeting, key: str, ranks: tuple[int, ...], rank: int, timeouts: GroupTimeouts | None, checked: bool
    ) -> GroupCoordinator:
        spec = GroupSpec(
            name=f"g{key[-3:]}",
            key=key,
            ranks=tuple(Rank(r) for r in ranks),
            rank=Rank(rank),
            device=torch.device("cpu"),
            timeouts=timeouts or GroupTimeouts(collective_s=20, control_s=20, p2p_s=20),
            checked=checked,
        )
        return open_coordinator(spec, None if len(ranks) == 1 else EVERY_MAKER[self.kind](meeting, key, ranks, rank))
