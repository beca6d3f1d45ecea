"""What holds for every operation: names, closing, busy groups, other processes, checking, aliases."""

import copy
import os
import pickle
import threading
from functools import partial
from itertools import product
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel_runtime.comm import (
    FakeCommunicator,
    GroupCoordinator,
    GroupSpec,
    GroupTimeouts,
    LocalCommunicator,
    LocalHub,
    open_coordinator,
)
from parallel_runtime.comm.traffic import Traffic
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, ContextStateError, GroupBusyError
from parallel_runtime.terms import Rank
from tests.spmd.worlds import MAKERS, World

KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))


def spec(ranks: tuple[int, ...] = (4,), rank: int = 4, name: str = "tp#3") -> GroupSpec:
    return GroupSpec(name=name, key="ctx/0/tp", ranks=tuple(Rank(r) for r in ranks), rank=Rank(rank), local_rank=1)


@pytest.mark.parametrize("shape", [(-1,), (2.5,), 4, None, (2**62,), "8"])
def test_impossible_shapes_are_refused_before_anything_is_sent(shape: Any) -> None:
    group = open_coordinator(spec((7, 3), 3), FakeCommunicator(1, 2))
    with pytest.raises(ArgumentError, match=r"symmetric_empty: shape=.* must be a sequence of sizes of 0 or more"):
        group.symmetric_empty(shape)
    with pytest.raises(ArgumentError, match="symmetric_empty: dtype must be a dtype, got 'float32'"):
        group.symmetric_empty((4,), "float32")  # type: ignore[arg-type]


def test_a_group_knows_its_place() -> None:
    group = open_coordinator(spec((7, 3, 5), 3), FakeCommunicator(1, 3))
    assert (group.name, group.key, group.ranks, group.world_size) == ("tp#3", "ctx/0/tp", (7, 3, 5), 3)
    assert (group.rank, group.rank_in_group, group.local_rank) == (3, 1, 1)
    assert (group.first_rank, group.last_rank, group.prev_rank, group.next_rank) == (7, 5, 7, 5)
    assert (group.is_first_rank, group.is_last_rank, group.is_open) == (False, False, True)
    assert group.device == torch.device("cpu")
    assert group.timeouts == GroupTimeouts()
    assert group.describe() == "tp#3 ranks (7, 3, 5): tensors over fake, messages over fake"
    assert repr(group) == "<GroupCoordinator tp#3 member 1 of 3, open>"


def test_it_is_opened_and_never_constructed_or_copied() -> None:
    with pytest.raises(ContextStateError, match="no public constructor"):
        GroupCoordinator()
    group = open_coordinator(spec())
    for copier in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(ContextStateError, match="contexts stay in their process"):
            copier(group)


def test_specs_and_communicators_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match="needs at least one rank and none twice"):
        spec((1, 1), 1)
    with pytest.raises(ArgumentError, match="rank 9 is not a member of group tp#3"):
        spec((1, 2), 9)
    with pytest.raises(ArgumentError, match="has 2 ranks and needs a communicator"):
        open_coordinator(spec((1, 2), 1))
    with pytest.raises(ArgumentError, match="this is member 0 of 2, its fake communicator is member 1 of 2"):
        open_coordinator(spec((1, 2), 1), FakeCommunicator(1, 2))


@KINDS
def test_a_closed_group_says_so(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        channel = group.channel("line", int)
        group.barrier()
        assert group.close() == 0
        assert group.close() == 0
        assert not group.is_open
        calls = (group.barrier, lambda: group.all_reduce(torch.ones(1)), lambda: group.broadcast_object(1), group.recv)
        for call in (*calls, lambda: channel.send(1)):
            with pytest.raises(ContextStateError, match=rf"on group {group.name}: the group is closed"):
                call()
        with pytest.raises(ContextStateError, match="the group is closed"):
            group.channel("other", int)

    World(kind)(2, body)


@KINDS
def test_a_second_thread_is_refused(kind: str) -> None:
    entered, refused = threading.Event(), threading.Event()

    def body(group: GroupCoordinator) -> None:
        if group.is_last_rank:
            assert refused.wait(30)
            group.barrier()
            return
        caught: list[BaseException] = []

        def intrude() -> None:
            while group.recent(1) == ():
                entered.wait(0.01)
            try:
                group.all_reduce(torch.ones(1))
            except GroupBusyError as exc:
                caught.append(exc)
            finally:
                refused.set()

        intruder = threading.Thread(target=intrude)
        intruder.start()
        group.barrier()
        intruder.join()
        assert "while another thread is inside seq 1 barrier of g0-1" in str(caught[0])

    World(kind)(2, body)


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_at_once() -> None:
    group = open_coordinator(spec())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            group.all_reduce(torch.ones(1))
            text = "nothing was raised"
        except ContextStateError as exc:
            text = str(exc)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert "the group belongs to another process" in text
    assert group.all_reduce(torch.ones(1)).item() == 1


def test_a_group_of_another_process_is_not_closed_here() -> None:
    group = open_coordinator(spec())
    traffic: Traffic = group._core.traffic
    traffic.pid += 1
    assert group.close() == 0
    traffic.pid -= 1
    assert group.is_open


@KINDS
def test_a_checked_group_compares_before_it_runs(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        with pytest.raises(
            CollectiveMismatchError,
            match=r"rank 0 entered all_reduce sum float32\[2\]; rank 1 entered broadcast from member 0 float32\[2\] ",
        ):
            (group.all_reduce if group.is_first_rank else group.broadcast)(torch.ones(2))
        with pytest.raises(CollectiveMismatchError, match=r"float32\[2\].*float32\[3\]"):
            group.all_reduce_(torch.ones(2 if group.is_first_rank else 3))
        with pytest.raises(CollectiveMismatchError, match=r"sum.*max"):
            group.all_reduce(torch.ones(2), "sum" if group.is_first_rank else "max")
        rows = torch.ones([1] * 200 if group.is_first_rank else [1] * 199 + [2])
        with pytest.raises(CollectiveMismatchError, match=r"\.\.\. #[0-9a-f]{16}; rank 1 .*\.\.\. #[0-9a-f]{16} \["):
            group.broadcast(rows)
        assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]
        assert group.broadcast_object(1) == 1

    World(kind)(2, body, checked=True)


def test_aliases_share_lock_sequence_and_end() -> None:
    communicator = LocalCommunicator(LocalHub(2), "k", 0, 2)
    one = open_coordinator(spec((0, 1), 0, "tp#0"), communicator)
    two = open_coordinator(spec((0, 1), 0, "stage#0"), communicator)
    one.isend(torch.ones(1))
    two.isend(torch.ones(1))
    assert [(record.group, record.sequence) for record in one.recent()] == [("tp#0", 1), ("stage#0", 2)]
    one.close()
    assert "k" in communicator._hub._meetings
    assert two.is_open
    assert communicator._meeting.closed == set()
    two.close()
    assert communicator._meeting.closed == {0}


@KINDS
@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR).*:UserWarning")
def test_exotic_tensors_are_refused(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        call: Any
        with pytest.raises(ArgumentError, match=r"expected a strided tensor, got torch.sparse_coo"):
            group.all_gather(torch.ones(2).to_sparse())
        elsewhere = torch.ones(2, device="meta")
        calls = (group.all_reduce, group.all_reduce_, group.all_gather, group.broadcast, group.send, group.isend, group.exchange)
        for call in (*calls, group.broadcast_):
            with pytest.raises(ArgumentError, match="moves tensors on cpu, this one is on meta; move it first"):
                call(elsewhere)
        with pytest.raises(ArgumentError, match="this one is on meta"):
            group.recv(out=elsewhere)
        with pytest.raises(ArgumentError, match="expected a tensor, got list"):
            group.all_gather([1.0])  # type: ignore[arg-type]
        reductions: tuple[Any, ...] = (group.all_reduce_, group.all_reduce, group.reduce, group.reduce_scatter)
        moves: tuple[Any, ...] = (group.all_gather, group.all_gatherv, group.all_to_all, group.gather, group.send)
        moves += (group.broadcast_, group.broadcast)
        plain, sparse = torch.ones(2), torch.ones(2, 2).to_sparse()
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        for _ in range(2):  # the second time, the plan of this dtype is known
            for call, (nothing, name) in product(
                reductions + moves, ((None, "NoneType"), ([1], "list"), (numpy.ones(2), "ndarray"))
            ):
                with pytest.raises(ArgumentError, match=f"expected a tensor, got {name}"):
                    call(nothing)
            for call, exotic in product(reductions + moves, (sparse, torch.ones(2, 2).to_sparse_csr(), ragged)):
                with pytest.raises(ArgumentError, match="expected a strided tensor, got"):
                    call(exotic)
            for call, op in product(reductions, (["sum"], None)):
                with pytest.raises(ArgumentError, match=r"unknown op .*; use one of sum"):
                    call(plain, op=op)
            outs: tuple[Any, ...] = (sparse, ragged, [1.0])
            for call, out in product((partial(group.all_reduce, plain), group.recv), outs):
                with pytest.raises(ArgumentError, match=r"expected a (strided )?tensor, got"):
                    call(out=out)
            assert group.all_reduce_(torch.ones(2)).tolist() == [2, 2]
        group.barrier()

    World(kind)(2, body)


@KINDS
def test_a_tensor_without_memory_is_refused(kind: str) -> None:
    """What a communicator did with its address ended the process."""

    def body(group: GroupCoordinator) -> None:
        with FakeTensorMode():
            fake = torch.ones(3)
        for call in (group.all_reduce, group.all_reduce_, group.all_gather, group.broadcast_, group.isend):
            for tensor in (fake, torch._to_functional_tensor(torch.ones(3))):
                with pytest.raises(ArgumentError, match="expected a tensor with memory of its own"):
                    call(tensor)
        with pytest.raises(ArgumentError, match="expected a tensor with memory of its own"):
            torch.vmap(group.all_reduce)(torch.ones(2, 3))
        assert group.all_reduce(torch.ones(1)).item() == 2

    World(kind)(2, body)


@KINDS
def test_deadlines_are_numbers_of_seconds(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        x = torch.ones(1)
        calls: tuple[Any, ...] = (group.barrier, partial(group.all_reduce_, x), group.recv, group.recv_object)
        for call, wrong in product(calls, ("3", 1e300, float("inf"), float("nan"), True, 0, -1, [1])):
            with pytest.raises(ArgumentError, match=r"timeout_s=.* must be a number of seconds above 0 and at most 1e"):
                call(timeout_s=wrong)
        group.barrier(timeout_s=1e9)
        group.all_reduce_(x, timeout_s=10**9)

    World(kind)(2, body)
    with pytest.raises(ArgumentError, match=r"p2p_s=1e\+300 must be a number of seconds above 0"):
        GroupTimeouts(p2p_s=1e300)
