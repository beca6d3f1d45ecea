"""The ring of records."""

from collections.abc import Sequence

import torch

from parallel_runtime.comm.recorder import RING_SIZE, Entry, Passed, Recorder


def test_it_keeps_the_newest_and_what_is_under_way() -> None:
    recorder = Recorder()
    for number in range(RING_SIZE + 5):
        recorder.finish(("tp#0", number, "all_reduce", torch.float32, (8, 576), 1.0), 0.002)
    assert len(recorder.tail(10_000)) == RING_SIZE
    assert [record.sequence for record in recorder.tail(2)] == [RING_SIZE + 3, RING_SIZE + 4]
    assert str(recorder.tail(1)[0]) == f"tp#0 seq {RING_SIZE + 4} all_reduce(float32[8, 576]): 2.000 ms"
    assert recorder.tail(0) == ()
    recorder.under_way = ("pp#0", 1, "barrier", None, (), 2.0)
    assert recorder.current is not None
    assert recorder.current.seconds is None
    assert str(recorder.tail()[-1]) == "pp#0 seq 1 barrier(): under way"
    recorder.finish(("pp#0", 1, "barrier", None, (), 2.0), 0.1)
    assert recorder.current is None


def test_observers_hear_what_finishes_and_how_long_it_waited() -> None:
    recorder, heard = Recorder(), list[tuple[int, float, float | None, int]]()

    def observer(entry: Entry, seconds: float, waited_s: float | None, passed: Sequence[Passed]) -> None:
        heard.append((entry[1], seconds, waited_s, sum(each.number for each in passed)))

    def operation(sequence: int, waits: tuple[float, ...]) -> None:
        for seconds in waits:
            recorder.add_wait(seconds)
        recorder.finish(("tp#0", sequence, "barrier", None, (), 0.0), 4.0)

    recorder.pass_message(True, (1, 0), 7)
    operation(1, ())
    recorder.observe(observer, tells_waiting=True)
    operation(2, (1.0, 2.0))
    recorder.pass_message(False, (1, 0), 8)
    operation(3, ())
    recorder.leave(observer)
    operation(4, ())
    recorder.observe(observer, tells_waiting=False)
    operation(5, (1.0,))
    recorder.leave(observer)
    recorder.leave(observer)
    assert heard == [(2, 4.0, 3.0, 0), (3, 4.0, 0.0, 8), (5, 4.0, None, 0)]
    assert recorder.observers == ()
