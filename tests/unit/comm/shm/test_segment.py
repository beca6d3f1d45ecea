"""Opening memory together: ways to get at it, sizes, refusals that are equal on every member."""

import json
import os
import resource
import socket
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from parallel_runtime.comm.shm.communicator import ShmCommunicator
from parallel_runtime.comm.shm.geometry import choose_geometries
from parallel_runtime.comm.shm.segment import Segment, SegmentWay, Unavailable, available_bytes, create_file, open_segment
from tests.unit.comm.shm.members import FileStore, MemoryStore, Processes


def together(world_size: int, call: Callable[[int], Any]) -> list[Any]:
    """``call(rank)`` in one thread per rank."""
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(call, range(world_size)))


class Tampering(MemoryStore):
    """A store that changes what member 0 offers."""

    def __init__(self, **changes: object) -> None:
        super().__init__()
        self._changes = changes

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("/offer"):
            value = json.dumps({**json.loads(value), **self._changes}).encode()
        super().set(key, value)


@pytest.mark.parametrize("ways", [("proc",), ("socket",), ("proc", "socket")])
def test_every_way_gives_the_same_memory(ways: Sequence[SegmentWay]) -> None:
    store = MemoryStore()
    segments = together(3, lambda rank: open_segment(store, "k", rank, 3, [8192], 10.0, ways))
    assert all(isinstance(segment, Segment) for segment in segments)
    segments[0].memory[5000:5003] = b"abc"
    assert [bytes(segment.memory[5000:5003]) for segment in segments] == [b"abc"] * 3
    assert [segment.way for segment in segments] == ["proc", ways[0], ways[0]]
    assert segments[1].pids == (os.getpid(),) * 3
    assert bytes(segments[2].memory[:16]) == bytes(16)


def test_where_proc_is_refused_the_descriptor_comes_over_a_socket() -> None:
    store = Tampering(fd=1_000_000)
    segments = together(2, lambda rank: open_segment(store, "k", rank, 2, [4096], 10.0))
    assert [segment.way for segment in segments] == ["proc", "socket"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fd": 1_000_000, "address": "nobody-listens-here"}, "member 1: .*[Cc]onnection refused"),
        ({"host": "another"}, "member 1: it runs on host .*, member 0 runs on host another"),
        ({"uid": 12345}, f"member 1: it runs as user {os.geteuid()}, member 0 runs as user 12345"),
        ({"token": "00"}, "member 1: .* is not the segment of this group"),
        ({"nbytes": 4097}, "member 1: .* has 4096 bytes"),
    ],
)
def test_what_one_member_cannot_do_none_does(changes: dict[str, object], reason: str) -> None:
    store = Tampering(**changes)
    first, second = together(2, lambda rank: open_segment(store, "k", rank, 2, [4096], 10.0))
    assert isinstance(first, Unavailable)
    assert first == second
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(first.reason)


def test_only_proc_allowed_and_refused() -> None:
    store = Tampering(fd=1_000_000)
    first, second = together(2, lambda rank: open_segment(store, "k", rank, 2, [4096], 10.0, ("proc",)))
    assert isinstance(first, Unavailable)
    assert first == second
    assert "No such file" in first.reason


def test_more_than_can_be_spared_is_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < available_bytes() < 1 << 50
    monkeypatch.setattr("parallel_runtime.comm.shm.segment.available_bytes", lambda: 10_000)
    descriptor, nbytes = create_file([16384, 8192])
    os.close(descriptor)
    assert nbytes == 8192
    with pytest.raises(OSError, match="16384 bytes asked for, 10000 can be spared"):
        create_file([16384])


def test_the_file_is_private_sealed_and_nameless() -> None:
    descriptor, nbytes = create_file([8192])
    try:
        facts = os.fstat(descriptor)
        assert (nbytes, facts.st_size) == (8192, 8192)
        assert stat.S_IMODE(facts.st_mode) == 0o600
        assert facts.st_blocks * 512 >= 8192
        assert "(deleted)" in os.readlink(f"/proc/self/fd/{descriptor}")
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def test_a_kernel_without_memfd_gets_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    before = sorted(os.listdir("/dev/shm"))
    store = MemoryStore()
    segments = together(2, lambda rank: open_segment(store, "k", rank, 2, [8192], 10.0))
    segments[0].memory[100] = 7
    assert segments[1].memory[100] == 7
    assert sorted(os.listdir("/dev/shm")) == before


def test_no_size_at_all_is_an_error() -> None:
    with pytest.raises(OSError, match="no size was asked for"):
        create_file([])


def limited(store: FileStore, rank: int, world_size: int, limit: int) -> str:
    """Open a group in a process whose files may not grow beyond ``limit``."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    made = ShmCommunicator.create(store, "k", rank, world_size, 20.0)
    if isinstance(made, Unavailable):
        return made.reason
    try:
        made.barrier(20.0)
        return made.describe()
    finally:
        made.close()


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_less_memory_gives_smaller_slots_and_too_little_a_refusal(tmp_path: Path) -> None:
    full, least = choose_geometries(2)[0].nbytes, choose_geometries(2)[-1].nbytes
    for number, (limit, expected) in enumerate(((full - 1, "slots of 256 KiB"), (least - 1, "member 0 cannot create"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Processes(folder, 2, limited, limit) as members:
            first, second = members.results()
        assert expected in first
        assert expected in second


def test_geometries_never_overlap() -> None:
    for world_size in (2, 3, 4, 8, 9, 33):
        for geometry in choose_geometries(world_size):
            ranks = range(world_size)
            spans = [(0, 16), (geometry.sleepers, 8 * geometry.sleeper_words)]
            spans += [(geometry.member(rank), 128) for rank in ranks]
            spans += [(geometry.bell(rank), 128) for rank in ranks]
            spans += [(geometry.report(rank), geometry.report_bytes) for rank in ranks]
            spans += [(geometry.header(rank, slot), 64) for rank in ranks for slot in range(4)]
            spans += [(geometry.slot(rank, slot), geometry.slot_bytes) for rank in ranks for slot in range(4)]
            for src in ranks:
                for dst in ranks:
                    if src != dst:
                        spans += [(geometry.written(src, dst), 128), (geometry.consumed(src, dst), 128)]
                        spans.append((geometry.ring(src, dst), geometry.ring_bytes))
            spans.sort()
            assert all(start + nbytes <= following for (start, nbytes), (following, _) in pairwise(spans))
            assert spans[-1][0] + spans[-1][1] == geometry.nbytes
            assert geometry.nbytes <= 32 << 20 or world_size > 32


def test_a_stranger_who_answers_at_the_address_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0parallel_runtime-test-stranger")
        listener.listen(1)
        store = Tampering(fd=1_000_000, address="parallel_runtime-test-stranger")
        first, second = together(2, lambda rank: open_segment(store, "k", rank, 2, [4096], 10.0))
    assert first == second == Unavailable(reason="member 1: another user answers at the address that member 0 gave")
