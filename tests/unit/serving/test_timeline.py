"""What a rank writes down about its time."""

from parallel_runtime.serving.controls import Span
from parallel_runtime.serving.timeline import Timeline


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def spend(timeline: Timeline, clock: Clock, what: str, seconds: float, num_tokens: int = 0) -> None:
    started_s = timeline.now()
    clock.now += seconds
    timeline.add(what, started_s, num_tokens=num_tokens)


def test_shares_are_of_the_time_between_the_first_batch_and_the_last() -> None:
    clock = Clock()
    timeline = Timeline(rank=3, stage=1, clock=clock)
    timeline.start()
    spend(timeline, clock, "schedule", 5)
    spend(timeline, clock, "compute", 3, num_tokens=8)
    spend(timeline, clock, "schedule", 1)
    spend(timeline, clock, "receive", 2, num_tokens=8)
    spend(timeline, clock, "compute", 4, num_tokens=8)
    spend(timeline, clock, "schedule", 50)
    profile = timeline.stop()
    assert (profile.rank, profile.stage, profile.seconds) == (3, 1, 65)
    assert (profile.busy, profile.scheduling) == (0.7, 0.1)
    assert profile.spans[1] == Span("compute", 105.0, 108.0, 8)


def test_nothing_is_written_down_unless_wanted() -> None:
    clock = Clock()
    timeline = Timeline(rank=0, stage=0, clock=clock)
    spend(timeline, clock, "compute", 1, num_tokens=1)
    started_s = timeline.now()
    timeline.start()
    timeline.add("compute", started_s, num_tokens=1)
    assert timeline.stop().spans == ()
    assert timeline.stop().seconds == timeline.now() == 0


def test_a_profile_is_bounded() -> None:
    clock = Clock()
    timeline = Timeline(rank=0, stage=0, clock=clock, max_spans=2)
    timeline.start()
    for _ in range(5):
        spend(timeline, clock, "compute", 1, num_tokens=1)
    assert len(timeline.stop().spans) == 2
