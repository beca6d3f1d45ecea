"""Questions to every leader: who is asked, who answers, and what is made of errors and silence."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from parallel_runtime.errors import PeerFailedError, PeerLostError, PeerTimeoutError
from parallel_runtime.serving.controls import (
    Answer,
    Control,
    ControlAction,
    Health,
    LoadWeights,
    Pause,
    ReceiveWeights,
    Sleep,
    Status,
    SwapWeights,
)
from parallel_runtime.serving.engine_controls import EngineControls
from parallel_runtime.serving.messages import FrontMessage

KILLED = PeerLostError("rank 5 was killed")
STATUS = Status(num_waiting=0, num_running=0, num_free_blocks=1, num_cached_blocks=0, num_reused_tokens=0, weights_version=0)


class Lines:
    """Two replicas of two leaders each, which answer at once, unless told otherwise."""

    leaders: tuple[tuple[int, int], ...] = ((0, 0), (0, 1), (2, 0), (2, 1))

    def __init__(self) -> None:
        self.told: list[tuple[int, ControlAction]] = []
        self.controls = EngineControls(self)
        self.error: Callable[[ControlAction], str | None] = lambda action: None
        self.silent: set[int] = set()
        self.admitted: list[int] = []
        self.owed: dict[int, list[int]] = {}
        self.lose_at: ControlAction | None = None

    def admit(self, replica: int) -> None:
        self.admitted.append(replica)

    def num_ranks(self, replica: int) -> int:
        return 4

    def tell(self, replica: int, message: FrontMessage) -> None:
        assert isinstance(message, Control)
        self.told.append((replica, message.action))
        if replica == 2 and message.action == self.lose_at:
            self.controls.lose(2, KILLED)
        elif replica in self.silent:
            self.owed.setdefault(replica, []).append(message.number)
        else:
            for dp_rank in range(2):
                answer = Answer(number=message.number, status=STATUS, error=self.error(message.action) if dp_rank else None)
                self.controls.take(replica, dp_rank, answer)

    def next_told(self, replica: int, *, count: int) -> list[ControlAction]:
        """What a silent replica was told, once it is as much as this."""
        while len(self.owed.get(replica, ())) < count:
            threading.Event().wait(0.01)
        return [action for told, action in self.told if told == replica]


def test_every_replica_is_asked_and_every_leader_answers() -> None:
    lines = Lines()
    assert lines.controls.health() == (STATUS,) * 4
    lines.controls.pause()
    assert lines.told == [(0, Health()), (2, Health()), (0, Pause()), (2, Pause())]


def test_silence_is_named() -> None:
    lines = Lines()
    lines.silent = {2}
    with pytest.raises(PeerTimeoutError, match=r"no answer within 0.01 s from replica 2 dp 0, replica 2 dp 1"):
        lines.controls.health(timeout_s=0.01)
    lines.controls.take(2, 0, Answer(number=0, status=STATUS))
    with pytest.raises(PeerTimeoutError, match="replica 2 dp 0, replica 2 dp 1"):
        lines.controls.health(timeout_s=0.01)  # the late answer is to another question


def test_a_replica_that_is_lost_is_not_waited_for() -> None:
    lines = Lines()
    lines.silent = {2}
    thread = threading.Timer(0.05, lines.controls.lose, args=(2, PeerLostError("rank 5 was killed")))
    thread.start()
    with pytest.raises(PeerLostError, match="a replica was lost before it answered: rank 5 was killed"):
        lines.controls.pause()
    thread.join()
    lines.controls.lose(None, PeerLostError("nobody waits"))
    lines.silent = set()
    lines.controls.pause()


def test_weights_are_exchanged_everywhere_or_nowhere() -> None:
    lines = Lines()
    assert lines.controls.update_weights("one") == 1
    assert lines.told == [(0, LoadWeights("one")), (2, LoadWeights("one")), (0, SwapWeights(1)), (2, SwapWeights(1))]
    lines.told.clear()
    lines.error = lambda action: "no room" if isinstance(action, LoadWeights) else None
    with pytest.raises(PeerFailedError, match="replica 0 dp 1: no room; replica 2 dp 1: no room"):
        lines.controls.update_weights("two")
    assert lines.told[2:] == [(0, SwapWeights(None)), (2, SwapWeights(None))]
    assert lines.controls.version == 1


def test_receivers_are_numbered_through_all_replicas() -> None:
    lines = Lines()
    lines.controls.receive_weights("host", 5, num_senders=2, version=9)
    first, second = (action for _, action in lines.told[:2])
    assert first == ReceiveWeights(host="host", port=5, num_senders=2, num_receivers=8, first_receiver=0)
    assert second == ReceiveWeights(host="host", port=5, num_senders=2, num_receivers=8, first_receiver=4)
    assert lines.controls.version == 9


def test_a_replica_that_comes_back_gets_the_weights_of_the_others() -> None:
    lines = Lines()
    lines.controls.join(2)
    assert (lines.told, lines.admitted) == ([], [2])
    lines.controls.update_weights("old")
    lines.controls.update_weights("full")
    lines.controls.update_weights({"model.norm.weight": torch.ones(2)})
    part = lines.told[-4][1]
    assert isinstance(part, LoadWeights)
    assert torch.equal(torch.load(part.path)["model.norm.weight"], torch.ones(2))
    lines.controls.sleep()
    lines.controls.pause()
    lines.controls.resume()
    lines.told.clear()
    lines.controls.join(2)
    assert lines.told == [(2, LoadWeights("full")), (2, SwapWeights(3)), (2, part), (2, SwapWeights(3)), (2, Sleep())]
    assert lines.admitted == [2, 2]
    lines.controls.lose(None, PeerLostError("the engine was closed"))
    assert not Path(part.path).exists()


def test_weights_of_a_trainer_are_not_there_for_one_that_comes_back() -> None:
    """It waits for the next update of all weights; one of some does not help it."""
    lines = Lines()
    lines.controls.receive_weights("host", 5)
    assert not lines.controls.is_stale(2), "it was there"
    lines.controls.lose(2, PeerLostError("rank 5 was killed"))
    lines.told.clear()
    lines.controls.join(2)
    assert (lines.told, lines.admitted, lines.controls.is_stale(2)) == ([], [], True)
    lines.controls.update_weights({"model.norm.weight": torch.ones(2)})
    assert (lines.admitted, lines.controls.is_stale(2)) == ([], True)
    lines.controls.update_weights("full")
    assert (lines.admitted, lines.controls.is_stale(2)) == ([2], False)
    lines.controls.lose(None, PeerLostError("the engine was closed"))


def test_one_that_comes_back_is_behind_until_it_has_done_all_it_was_told() -> None:
    """Till then it gets no requests and is asked for no health, for it would tell the old version; all else it is asked."""
    lines = Lines()
    lines.controls.update_weights("new")
    lines.controls.lose(2, KILLED)
    assert lines.controls.is_behind(2)
    lines.silent = {2}
    lines.told.clear()
    assert lines.controls.health() == (STATUS,) * 2, "its leaders serve, and it has not joined"
    lines.controls.join(2)
    assert lines.controls.health() == (STATUS,) * 2
    pauser = threading.Thread(target=lines.controls.pause)
    pauser.start()
    assert lines.next_told(2, count=3) == [LoadWeights("new"), SwapWeights(1), Pause()]
    answers = lines.owed[2]
    for number in answers[:2]:
        assert (lines.admitted, lines.controls.is_behind(2)) == ([], True)
        for dp_rank in range(2):
            lines.controls.take(2, dp_rank, Answer(number=number, status=STATUS))
    assert (lines.admitted, lines.controls.is_behind(2)) == ([2], False)
    for dp_rank in range(2):
        lines.controls.take(2, dp_rank, Answer(number=answers[2], status=STATUS))
    pauser.join()
    lines.silent = set()
    assert lines.controls.health() == (STATUS,) * 4
    assert lines.admitted == [2]


def test_one_that_is_lost_again_before_it_is_there_gets_no_requests() -> None:
    lines = Lines()
    lines.controls.update_weights("new")
    lines.controls.lose(2, KILLED)
    lines.silent = {2}
    lines.controls.join(2)
    lines.controls.lose(2, KILLED)
    for number in lines.owed[2]:
        for dp_rank in range(2):
            lines.controls.take(2, dp_rank, Answer(number=number, status=STATUS))
    assert (lines.admitted, lines.controls.is_behind(2)) == ([], True)


def test_weights_that_some_have_taken_are_those_of_all() -> None:
    """One that is lost as it takes them comes back with them, for the others serve with them already."""
    lines = Lines()
    lines.lose_at = SwapWeights(1)
    assert lines.controls.update_weights("new") == lines.controls.version == 1
    lines.told.clear()
    lines.controls.join(2)
    assert lines.told == [(2, LoadWeights("new")), (2, SwapWeights(1))]


def test_weights_that_nobody_has_taken_are_not_there() -> None:
    lines = Lines()
    lines.leaders = ((2, 0), (2, 1))
    lines.lose_at = SwapWeights(1)
    with pytest.raises(PeerLostError, match="a replica was lost before it answered: rank 5 was killed"):
        lines.controls.update_weights("new")
    assert lines.controls.version == 0
    lines.told.clear()
    lines.controls.join(2)
    assert (lines.told, lines.admitted) == ([], [2])


def test_one_that_is_lost_as_it_takes_the_weights_of_a_trainer_lacks_them() -> None:
    lines = Lines()
    lines.lose_at = SwapWeights(1)
    assert lines.controls.receive_weights("host", 5) == 1
    lines.controls.join(2)
    assert (lines.admitted, lines.controls.is_stale(2), lines.controls.is_stale(0)) == ([], True, False)


def test_nothing_is_asked_between_what_one_is_told_as_it_joins() -> None:
    """An update that begins meanwhile would be taken by the swap of the one before."""
    lines = Lines()
    lines.controls.update_weights("old")
    lines.controls.lose(2, KILLED)
    lines.told.clear()
    updates: list[threading.Thread] = []

    def update_too(action: ControlAction) -> None:
        if not updates:
            updates.append(threading.Thread(target=lines.controls.update_weights, args=("new",)))
            updates[0].start()
            updates[0].join(0.2)  # it would be through by then

    lines.error = update_too
    lines.controls.join(2)
    updates[0].join()
    assert [action for replica, action in lines.told if replica == 2] == [
        *(LoadWeights("old"), SwapWeights(1)),
        *(LoadWeights("new"), SwapWeights(2)),
    ]


def test_one_that_comes_up_during_an_update_joins_after_it() -> None:
    lines = Lines()
    lines.leaders = ((0, 0), (0, 1))

    def come_up(action: ControlAction) -> None:
        if isinstance(action, LoadWeights) and lines.leaders[-1][0] == 0:
            lines.leaders = (*lines.leaders, (2, 0), (2, 1))
            lines.controls.join(2)

    lines.error = come_up
    lines.controls.update_weights("new")
    assert lines.told == [(0, LoadWeights("new")), (0, SwapWeights(1)), (2, LoadWeights("new")), (2, SwapWeights(1))]
    assert lines.admitted == [2]


def test_one_that_cannot_do_what_the_others_did_is_told_of() -> None:
    lines = Lines()
    lines.controls.update_weights("new")
    lines.error = lambda action: "no such file"
    with pytest.raises(PeerFailedError, match="replica 2 does not get where the others are: no such file"):
        lines.controls.join(2)


def test_who_is_busy_is_known_until_all_its_leaders_have_answered() -> None:
    lines = Lines()
    lines.silent = {2}
    thread = threading.Thread(target=lines.controls.pause)
    thread.start()
    while not lines.controls.is_busy(2):
        pass
    assert not lines.controls.is_busy(0)
    lines.controls.take(2, 0, Answer(number=0, status=STATUS))
    assert lines.controls.is_busy(2)
    lines.controls.take(2, 1, Answer(number=0, status=STATUS))
    thread.join()
    assert not lines.controls.is_busy(2)
    with pytest.raises(PeerTimeoutError):
        lines.controls.health(timeout_s=0.01)
    assert not lines.controls.is_busy(2), "one that turns answers that at once"
