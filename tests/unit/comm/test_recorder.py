"""The ring of records."""

import torch

from parallel_runtime.comm.recorder import RING_SIZE, Recorder


def test_it_keeps_the_newest_and_what_is_under_way() -> None:
    recorder = Recorder()
    for number in range(RING_SIZE + 5):
        recorder.finish(("tp#0", number, "all_reduce", torch.float32, (8, 576), 1.0), 0.002)
    assert len(recorder.tail(10_000)) == RING_SIZE
    assert [record.sequence for record in recorder.tail(2)] == [RING_SIZE + 3, RING_SIZE + 4]
    assert str(recorder.tail(1)[0]) == f"tp#0 seq {RING_SIZE + 4} all_reduce(float32[8, 576]): 2.000 ms"
    assert recorder.tail(0) == ()
    recorder.start(("pp#0", 1, "barrier", None, (), 2.0))
    assert recorder.current is not None
    assert recorder.current.seconds is None
    assert str(recorder.tail()[-1]) == "pp#0 seq 1 barrier(): under way"
    recorder.finish(("pp#0", 1, "barrier", None, (), 2.0), 0.1)
    assert recorder.current is None
