"""The leader's desk: which messages become which step."""

from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec
import pytest

from parallel_runtime.serving.controls import Answer, Control, Health, Pause, Status
from parallel_runtime.serving.leader import LeaderDesk
from parallel_runtime.serving.messages import (
    Abort,
    FinishReason,
    FrontMessage,
    LeaderMessage,
    Ping,
    Pong,
    Rejected,
    Request,
    Sampled,
    Shutdown,
    Step,
    StepOutput,
    Submit,
    Wake,
    decode_leader,
    encode,
)
from parallel_runtime.serving.policy import PolicyLimits, SchedulingPolicy
from parallel_runtime.serving.sampling_params import SamplingParams

STATUS = Status(num_waiting=1, num_running=2, num_free_blocks=3, num_cached_blocks=1, num_reused_tokens=4, weights_version=5)


def make(name: str, *prompt: int, new: int = 4) -> Request:
    return Request(request_id=name, prompt=prompt or (1,), sampling=SamplingParams(max_new_tokens=new))


@dataclass
class Office:
    front: Connection
    desk: LeaderDesk
    policy: SchedulingPolicy

    def say(self, *messages: FrontMessage) -> None:
        for message in messages:
            self.front.send_bytes(encode(message))

    def heard(self) -> list[LeaderMessage]:
        heard: list[LeaderMessage] = []
        while self.front.poll():
            heard.append(decode_leader(self.front.recv_bytes()))
        return heard


@pytest.fixture
def office() -> Iterator[Office]:
    front, leader = Pipe()
    policy = SchedulingPolicy(PolicyLimits(num_blocks=10, page_size=4, max_waiting=2, max_request_tokens=30))
    with front, leader:
        yield Office(front=front, desk=LeaderDesk(leader, policy, vocab_size=100, status=lambda: STATUS), policy=policy)


def test_requests_enter_a_step_in_order(office: Office) -> None:
    office.say(Submit(make("b")), Submit(make("a")))
    assert office.desk.collect(Sampled((7,)), wait_s=1.0) == Step(sampled=(7,), requests=(make("b"), make("a")))
    assert office.desk.collect(None, wait_s=0.0) == Step()
    assert office.heard() == []


def test_aborts_reach_the_policy_or_end_a_request_that_just_came(office: Office) -> None:
    office.policy.add(make("old"))
    office.say(Submit(make("new")), Abort("new"), Abort("old"), Abort("unknown"))
    assert office.desk.collect(None, wait_s=1.0) == Step(aborts=("old", "unknown"))
    assert office.heard() == [StepOutput(request_id="new", finish_reason=FinishReason.ABORT)]


def test_abort_of_everything(office: Office) -> None:
    office.policy.add(make("old"))
    office.say(Submit(make("new")), Abort())
    assert office.desk.collect(None, wait_s=1.0) == Step(aborts=("old",))
    assert office.heard() == [StepOutput(request_id="new", finish_reason=FinishReason.ABORT)]


def test_what_cannot_be_served_is_refused_and_enters_no_step(office: Office) -> None:
    office.policy.add(make("old"))
    office.say(Submit(make("a", 100)), Submit(make("b", 1, new=30)), Submit(make("old")), Submit(make("c")))
    office.say(Submit(make("c")), Submit(make("d")))
    assert office.desk.collect(None, wait_s=1.0) == Step(requests=(make("c"),))
    refused = office.heard()
    assert [(message.request_id, message.queue_full) for message in refused if isinstance(message, Rejected)] == [
        ("a", False),
        ("b", False),
        ("old", False),
        ("c", False),
        ("d", True),
    ]
    texts = [message.message for message in refused if isinstance(message, Rejected)]
    for text, part in zip(texts, ("0 to 99", "holds 30", "alive already", "alive already", "max_waiting=2"), strict=True):
        assert part in text


def test_shutdown_and_a_front_that_is_gone_end_everything(office: Office) -> None:
    office.policy.add(make("old"))
    office.say(Submit(make("new")), Shutdown())
    assert office.desk.collect(Sampled((1,)), wait_s=1.0) == Step(sampled=(1,), aborts=("old",), shutdown=True)
    office.front.close()
    assert office.desk.collect(None, wait_s=1.0).shutdown


def test_an_answer_to_a_front_that_is_gone_ends_everything(office: Office) -> None:
    office.front.close()
    office.desk.send(StepOutput(request_id="a", token_ids=(1,)))
    assert office.desk.collect(None, wait_s=0.0).shutdown


def test_bytes_that_are_no_message_are_dropped(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    for payload in (
        b"",
        b"\xc1",
        b"\x91" * 5000,
        b"\xa1\xff",
        encode(Submit(make("x")))[:-3],
        msgspec.msgpack.encode({"type": 5}),
    ):
        office.front.send_bytes(payload)
    office.say(Submit(make("a")))
    assert office.desk.collect(None, wait_s=1.0) == Step(requests=(make("a"),))
    assert [record.getMessage()[:43] for record in caplog.records] == ["a message of the front process is dropped: "] * 6
    assert "1 bytes are not the message expected here" in caplog.text
    assert (office.heard(), office.desk.num_told) == ([], 1)


def test_a_request_that_cannot_be_decoded_is_refused(office: Office) -> None:
    raw = msgspec.to_builtins(Submit(make("a")))
    raw["request"]["sampling"]["ignore_eos"] = "yes"
    office.front.send_bytes(msgspec.msgpack.encode(raw))
    office.say(Submit(make("b")))
    assert office.desk.collect(None, wait_s=1.0) == Step(requests=(make("b"),))
    (refused,) = office.heard()
    assert isinstance(refused, Rejected)
    assert refused.request_id == "a"
    assert "ignore_eos" in refused.message
    assert office.desk.num_told == 2, "other leaders were woken for it"


def test_messages_that_may_bring_work_are_counted(office: Office) -> None:
    office.say(Submit(make("a")), Wake(), Abort("a"), Submit(make("b", 100)), Wake())
    assert office.desk.collect(None, wait_s=0.0).requests == ()
    assert office.desk.num_told == 4, "one that is refused was told to the other leaders as well"
    assert not office.desk.is_over
    office.say(Shutdown())
    assert office.desk.collect(None, wait_s=0.0).shutdown
    assert (office.desk.num_told, office.desk.is_over) == (4, True)
    assert office.desk.collect(None, wait_s=0.0).shutdown, "it stays over, as long as other leaders go on"


def test_the_front_hears_that_the_loop_turns(office: Office) -> None:
    office.say(Ping(), Submit(make("a")))
    assert office.desk.collect(None, wait_s=1.0) == Step(requests=(make("a"),))
    assert (office.heard(), office.desk.num_told) == ([Pong()], 1)


def test_controls_wait_and_health_is_told_in_the_same_turn(office: Office) -> None:
    pause = Control(number=2, action=Pause())
    office.say(Control(number=1, action=Health()), pause)
    assert office.desk.collect(None, wait_s=1.0) == Step()
    assert (list(office.desk.controls), office.desk.num_told) == ([pause], 2)
    for heard in ([Answer(number=1, status=STATUS)], []):
        office.desk.tell_status()
        assert office.heard() == heard


def test_a_front_that_is_gone_is_over(office: Office) -> None:
    office.front.close()
    assert office.desk.collect(None, wait_s=0.0).shutdown
    assert office.desk.is_over
