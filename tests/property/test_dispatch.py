"""Requests over replicas that come and go: none is lost, none is answered twice, no token is repeated or left out."""

from dataclasses import dataclass, field

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parallel_runtime.errors import PeerLostError, QueueFullError, RequestError
from parallel_runtime.serving.balancer import BalancePolicy
from parallel_runtime.serving.dispatch import Action, Deliver, Dispatcher, Send
from parallel_runtime.serving.messages import Abort, FinishReason, Rejected, Request, StepOutput, Submit, Wake
from parallel_runtime.serving.sampling_params import SamplingParams

MOST_ALIVE, MOST_PER_WORKER, MAX_RUNS = 12, 3, 3


@dataclass
class Answer:
    """What the one who waits for a request has got."""

    tokens: list[int] = field(default_factory=list)
    end: FinishReason | Exception | None = None
    is_unwanted: bool = False
    num_runs: int = 0


class Engine(RuleBasedStateMachine):
    """Workers are dictionaries of the requests they have; the token of a position is that position."""

    @initialize(
        replicas=st.integers(1, 3), dp=st.integers(1, 2), policy=st.sampled_from(list(BalancePolicy)), lockstep=st.booleans()
    )
    def begin(self, replicas: int, dp: int, policy: BalancePolicy, lockstep: bool) -> None:
        self.dp, self.replicas, self.lockstep = dp, replicas, lockstep
        self.dispatcher = Dispatcher(
            replicas,
            dp=dp,
            policy=policy,
            most_alive=MOST_ALIVE,
            most_per_worker=MOST_PER_WORKER,
            max_runs=MAX_RUNS,
            lockstep=lockstep,
        )
        self.running: dict[int, dict[str, Request]] = {worker: {} for worker in range(replicas * dp)}
        self.ghosts: list[tuple[int, str]] = []
        self.up: set[int] = set()
        self.draining: set[int] = set()
        self.answers: dict[str, Answer] = {}

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.send(action)
            else:
                self.deliver(action)

    def send(self, action: Send) -> None:
        worker, message = action
        assert worker // self.dp in self.up, "it cannot be reached"
        if isinstance(message, Submit):
            request = message.request
            assert worker // self.dp not in self.draining
            assert not any(request.request_id in held for held in self.running.values()), "it runs twice"
            assert list(request.made) == self.answers[request.request_id].tokens
            self.answers[request.request_id].num_runs += 1
            self.running[worker][request.request_id] = request
            assert len(self.running[worker]) <= MOST_PER_WORKER
        elif isinstance(message, Abort):
            assert message.request_id in self.running[worker], "it is aborted where it is not"
            self.answers[message.request_id or ""].is_unwanted = True
        else:
            assert isinstance(message, Wake)
            assert self.lockstep

    def deliver(self, action: Deliver) -> None:
        answer = self.answers[action.request_id]
        assert answer.end is None, "it was answered already"
        if isinstance(action.what, StepOutput):
            answer.tokens += action.what.token_ids
            answer.end = action.what.finish_reason
        else:
            answer.end = action.what
        assert action.is_last == (answer.end is not None)

    @rule(new=st.integers(1, 4), drawn=st.booleans(), start=st.integers(0, 3), wanted=st.none() | st.integers(0, 5))
    def submit(self, new: int, drawn: bool, start: int, wanted: int | None) -> None:
        name = f"r{len(self.answers)}"
        sampling = SamplingParams(max_new_tokens=new, temperature=1.0 if drawn else 0.0)
        request = Request(request_id=name, prompt=(start,) * 20, sampling=sampling)
        alive = sum(answer.end is None for answer in self.answers.values())
        self.answers[name] = Answer()
        try:
            self.do(self.dispatcher.submit(request, to=wanted))
        except QueueFullError:
            assert alive == MOST_ALIVE
            del self.answers[name]
        except RequestError:
            assert wanted is not None
            assert wanted // self.dp not in self.up - self.draining or wanted >= self.replicas * self.dp
            del self.answers[name]

    def some_running(self, data: st.DataObject) -> tuple[int, Request]:
        pairs = [(worker, name) for worker, held in self.running.items() for name in held]
        worker, name = data.draw(st.sampled_from(pairs))
        return worker, self.running[worker][name]

    def has_running(self) -> bool:
        return any(self.running.values())

    @precondition(has_running)
    @rule(data=st.data(), count=st.integers(1, 2))
    def step(self, data: st.DataObject, count: int) -> None:
        """A worker makes tokens, and ends a request that has all of them."""
        worker, request = self.some_running(data)
        made = self.answers[request.request_id].tokens
        count = min(count, request.sampling.max_new_tokens - len(made))
        tokens = tuple(range(len(made), len(made) + count))
        is_last = len(made) + count == request.sampling.max_new_tokens
        reason = FinishReason.LENGTH if is_last else None
        if is_last:
            del self.running[worker][request.request_id]
        self.do(self.dispatcher.take(worker, StepOutput(request_id=request.request_id, token_ids=tokens, finish_reason=reason)))

    @precondition(has_running)
    @rule(data=st.data())
    def heed_an_abort(self, data: st.DataObject) -> None:
        worker, request = self.some_running(data)
        if self.answers[request.request_id].is_unwanted:
            del self.running[worker][request.request_id]
            ended = StepOutput(request_id=request.request_id, finish_reason=FinishReason.ABORT)
            self.do(self.dispatcher.take(worker, ended))

    @precondition(has_running)
    @rule(data=st.data(), is_full=st.booleans())
    def refuse(self, data: st.DataObject, is_full: bool) -> None:
        worker, request = self.some_running(data)
        del self.running[worker][request.request_id]
        self.do(self.dispatcher.take(worker, Rejected(request_id=request.request_id, message="no", queue_full=is_full)))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.do(self.dispatcher.abort(data.draw(st.none() | st.sampled_from([*self.answers, "unknown"]))))

    @rule(data=st.data())
    def come_up(self, data: st.DataObject) -> None:
        replica = data.draw(st.integers(0, self.replicas - 1))
        self.up.add(replica)
        self.draining.discard(replica)
        self.do(self.dispatcher.open(replica))

    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        replica = data.draw(st.integers(0, self.replicas - 1))
        self.draining.add(replica)
        self.dispatcher.drain(replica)
        held = [worker for worker in range(replica * self.dp, (replica + 1) * self.dp) if self.running[worker]]
        assert self.dispatcher.is_drained(replica) == (not held)

    @precondition(lambda self: bool(self.up))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A replica dies; what it still says, or said before it was found dead, counts for nothing."""
        replica = data.draw(st.sampled_from(sorted(self.up)))
        self.up.discard(replica)
        for worker in range(replica * self.dp, (replica + 1) * self.dp):
            self.ghosts += [(worker, name) for name in self.running[worker]]
            self.running[worker].clear()
        self.do(self.dispatcher.lose(replica, PeerLostError(f"replica {replica} was killed")))

    @precondition(lambda self: bool(self.ghosts))
    @rule(data=st.data())
    def hear_a_ghost(self, data: st.DataObject) -> None:
        worker, name = data.draw(st.sampled_from(self.ghosts))
        if name not in self.running[worker]:
            assert self.dispatcher.take(worker, StepOutput(request_id=name, token_ids=(99,))) == []

    @invariant()
    def every_request_is_somewhere(self) -> None:
        alive = {name for name, answer in self.answers.items() if answer.end is None}
        running = {name for held in self.running.values() for name in held}
        assert running <= alive
        assert self.dispatcher.num_alive == len(alive)
        assert self.dispatcher.num_held == len(alive - running)
        assert self.dispatcher.requests_per_worker == tuple(len(self.running[worker]) for worker in sorted(self.running))

    @invariant()
    def no_token_is_repeated_or_left_out(self) -> None:
        for answer in self.answers.values():
            assert answer.tokens == list(range(len(answer.tokens)))
            assert answer.num_runs <= MAX_RUNS

    @invariant()
    def nothing_waits_where_there_is_room(self) -> None:
        free = [
            worker
            for worker, held in self.running.items()
            if worker // self.dp in self.up - self.draining and len(held) < MOST_PER_WORKER
        ]
        waiting = [
            name for name, answer in self.answers.items() if answer.end is None and self.dispatcher.worker_of(name) is None
        ]
        assert not (free and waiting) or all(self.dispatcher.wants(name) for name in waiting)

    def teardown(self) -> None:
        """However it went, everybody is answered in the end."""
        if not hasattr(self, "dispatcher"):
            return
        for replica in range(self.replicas):
            self.up.add(replica)
            self.draining.discard(replica)
            self.do(self.dispatcher.open(replica))
        while self.has_running():
            for worker, held in self.running.items():
                for name, request in list(held.items()):
                    del self.running[worker][name]
                    made = self.answers[name].tokens
                    tokens = tuple(range(len(made), request.sampling.max_new_tokens))
                    last = StepOutput(request_id=name, token_ids=tokens, finish_reason=FinishReason.LENGTH)
                    self.do(self.dispatcher.take(worker, last))
        assert all(answer.end is not None for answer in self.answers.values())


TestDispatch = Engine.TestCase
TestDispatch.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, deadline=None)


def submitted(actions: list[Action]) -> list[Request]:
    return [action.message.request for action in actions if isinstance(action, Send) and isinstance(action.message, Submit)]


def test_a_request_that_loses_every_replica_is_given_up() -> None:
    dispatcher = Dispatcher(2, max_runs=2)
    for replica in range(2):
        dispatcher.open(replica)
    request = Request(request_id="a", prompt=(1,), sampling=SamplingParams())
    assert submitted(dispatcher.submit(request)) == [request]
    assert submitted(dispatcher.lose(0, PeerLostError("first"))) == [request]
    (given_up,) = dispatcher.lose(1, PeerLostError("second"))
    assert isinstance(given_up, Deliver)
    assert str(given_up.what) == "request 'a' was given up: 2 replicas were lost while they ran it; second"
    assert isinstance(given_up.what, PeerLostError)
    assert dispatcher.num_alive == 0


def test_all_that_wait_hear_of_the_end() -> None:
    dispatcher = Dispatcher(1)
    dispatcher.open(0)
    for name in "ab":
        dispatcher.submit(Request(request_id=name, prompt=(1,), sampling=SamplingParams()))
    error = PeerLostError("gone")
    assert dispatcher.fail(error) == [Deliver("a", error, True), Deliver("b", error, True)]
    assert (dispatcher.num_alive, dispatcher.fail(error)) == (0, [])


def test_one_that_was_made_in_full_ends_though_its_last_word_is_lost() -> None:
    dispatcher = Dispatcher(2)
    for replica in range(2):
        dispatcher.open(replica)
    dispatcher.submit(Request(request_id="a", prompt=(1,), sampling=SamplingParams(max_new_tokens=1)))
    dispatcher.take(0, StepOutput(request_id="a", token_ids=(5,)))
    ended = StepOutput(request_id="a", finish_reason=FinishReason.LENGTH)
    assert dispatcher.lose(0, PeerLostError("gone")) == [Deliver("a", ended, True)]


def test_seeds_are_handed_out_in_the_order_of_arrival() -> None:
    drawing = SamplingParams(temperature=0.5)
    requests = [Request(request_id=name, prompt=(1,), sampling=drawing) for name in "abc"]
    seeds = []
    for _ in range(2):
        dispatcher = Dispatcher(1, seed=7)
        dispatcher.open(0)
        seeds.append([submitted(dispatcher.submit(request))[0].sampling.seed for request in requests])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    own = msgspec.structs.replace(requests[0], request_id="d", sampling=SamplingParams(temperature=0.5, seed=11))
    assert submitted(dispatcher.submit(own)) == [own]
