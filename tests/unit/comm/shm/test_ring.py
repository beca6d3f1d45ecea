"""The ring of one pair: whole messages where they fit in one piece, pieces where they do not, never a byte over the other."""

from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.comm.shm.ring import RingEnd

RING_BYTES = 4096


def ends() -> tuple[RingEnd, RingEnd]:
    """Writer and reader of a new ring."""
    memory, words = memoryview(bytearray(RING_BYTES)), memoryview(bytearray(16)).cast("q")
    return (
        RingEnd(memory, words, mine=0, theirs=1, is_writer=True),
        RingEnd(memory, words, mine=1, theirs=0, is_writer=False),
    )


def fill(nbytes: int, salt: int) -> memoryview:
    return memoryview(bytearray((place * 7 + salt) % 251 for place in range(nbytes)))


@given(sizes=st.lists(st.integers(0, 3000), max_size=30))
def test_whole_messages_and_pieces_follow_each_other(sizes: list[int]) -> None:
    writer, reader = ends()
    for number, nbytes in enumerate(sizes):
        sent, got = fill(nbytes, number), memoryview(bytearray(nbytes))
        if not writer.write_whole(number, sent):
            assert writer.write_header(number, nbytes)
            writer.announce()
            rest = sent
            while len(rest):
                rest = rest[writer.write(rest) :]
            writer.align()
            writer.announce()
        assert reader.read_header() == (number, nbytes, 0)
        if not reader.read_whole(got):
            filled = 0
            while filled < nbytes:
                filled += reader.read(got[filled:])
            reader.align()
            reader.announce()
        assert got == sent
        assert reader.position == writer.position == writer.consumed()


def test_nothing_is_written_over_what_was_not_read() -> None:
    writer, reader = ends()
    first = fill(3000, 1)
    assert writer.write_whole(1, first)
    assert not writer.write_whole(2, fill(2000, 2))
    got = memoryview(bytearray(3000))
    assert reader.read_header() == (1, 3000, 0)
    assert reader.read_whole(got)
    assert got == first
    assert reader.read_header() is None


def test_a_message_that_is_not_all_here_is_not_read() -> None:
    writer, reader = ends()
    assert writer.write_header(1, 1000)
    assert writer.write(fill(500, 1)) == 500
    writer.announce()
    assert reader.read_header() == (1, 1000, 0)
    assert not reader.read_whole(memoryview(bytearray(1000)))
