"""The scheduling policy under any order of events: nothing leaks, nothing is lost or served twice, nobody starves."""

from collections import Counter
from itertools import chain

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parallel_runtime.errors import QueueFullError
from parallel_runtime.serving.blocks import blocks_for
from parallel_runtime.serving.messages import Request, SamplingParams
from parallel_runtime.serving.policy import Batch, PolicyLimits, SchedulingPolicy

STOP = 0


class PolicyMachine(RuleBasedStateMachine):
    """Two policies get the same calls, as two ranks do; a third party keeps the books."""

    @initialize(
        num_blocks=st.integers(1, 8),
        page_size=st.integers(1, 3),
        requests=st.integers(1, 4),
        extra=st.integers(0, 12),
        slots=st.integers(1, 3),
        waiting=st.integers(1, 5),
        first=st.lists(st.tuples(st.integers(1, 6), st.integers(2, 8)), min_size=1, max_size=4),
    )
    def start(
        self, num_blocks: int, page_size: int, requests: int, extra: int, slots: int, waiting: int, first: list[tuple[int, int]]
    ) -> None:
        self.limits = PolicyLimits(
            num_blocks=num_blocks,
            page_size=page_size,
            max_batch_requests=requests,
            max_batch_tokens=requests + extra,
            max_waiting=waiting,
            max_request_tokens=30,
            num_slots=slots,
        )
        self.policy, self.twin = SchedulingPolicy(self.limits), SchedulingPolicy(self.limits)
        self.alive: dict[str, tuple[Request, list[int]]] = {}
        self.under_way: list[Batch] = []
        self.ended: Counter[str] = Counter()
        self.num_made = 0
        self.next_token = 1
        for prompt, new in first:
            self.add(prompt, new)

    @rule(prompt=st.integers(1, 12), new=st.integers(1, 6))
    def add(self, prompt: int, new: int) -> None:
        room = min(self.limits.max_request_tokens, self.limits.num_blocks * self.limits.page_size)
        prompt, new = min(prompt, room), min(new, room - min(prompt, room))
        if new < 1:
            return
        name = f"r{self.num_made}"
        sampling = SamplingParams(max_new_tokens=new, stop_token_ids=(STOP,))
        request = Request(request_id=name, prompt=tuple(range(1, prompt + 1)), sampling=sampling)
        self.num_made += 1
        try:
            self.policy.add(request)
        except QueueFullError:
            assert self.policy.num_waiting >= self.limits.max_waiting
            return
        self.twin.add(request)
        self.alive[name] = (request, [])

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*self.alive, "unknown"]))
        was_alive = self.alive.pop(name, None) is not None
        assert self.policy.abort(name) is self.twin.abort(name) is was_alive
        self.ended[name] += was_alive

    @precondition(lambda self: len(self.under_way) < self.limits.num_slots)
    @rule()
    def schedule(self) -> None:
        batch = self.policy.schedule()
        assert batch == self.twin.schedule()
        assert batch.num_tokens <= self.limits.max_batch_tokens
        assert len(batch.chunks) <= self.limits.max_batch_requests
        busy = {(chunk.request_id, chunk.arrival) for chunk in chain.from_iterable(other.chunks for other in self.under_way)}
        for chunk in batch.chunks:
            request, made = self.alive[chunk.request_id]
            known = [*request.prompt, *made]
            assert list(chunk.token_ids) == known[chunk.start : chunk.length]
            assert chunk.token_ids
            assert chunk.is_sampled == (chunk.length == len(known))
            assert len(chunk.blocks) >= blocks_for(chunk.length, self.limits.page_size)
            assert (chunk.request_id, chunk.arrival) not in busy
        held = Counter(chain.from_iterable(chunk.blocks for chunk in batch.chunks))
        assert not held or max(held.values()) == 1
        if batch.chunks:
            self.under_way.append(batch)

    @precondition(lambda self: self.under_way)
    @rule(stops=st.sets(st.integers(0, 3), max_size=1) | st.just(set()))
    def complete(self, stops: set[int]) -> None:
        batch = self.under_way.pop(0)
        tokens = [STOP if index in stops else self.next_token + index for index in range(len(batch.sampled))]
        self.next_token += len(tokens)
        outputs = self.policy.complete(tokens)
        assert outputs == self.twin.complete(tokens)
        expected = [(chunk.request_id, token) for chunk, token in zip(batch.sampled, tokens, strict=True)]
        assert [(output.request_id, output.token_ids[0]) for output in outputs] == [
            pair for pair in expected if pair[0] in self.alive
        ]
        for output in outputs:
            request, made = self.alive[output.request_id]
            made.extend(output.token_ids)
            is_last = made[-1] == STOP or len(made) == request.sampling.max_new_tokens
            assert (output.finish_reason is not None) == is_last
            if is_last:
                del self.alive[output.request_id]
                self.ended[output.request_id] += 1

    @rule(count=st.integers(1, 5))
    def turns(self, count: int) -> None:
        for _ in range(count):
            if len(self.under_way) < self.limits.num_slots:
                self.schedule()
            if self.under_way:
                self.complete(set())

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "policy"):
            return
        assert self.policy.num_running + self.policy.num_waiting == len(self.alive)
        assert 0 <= self.policy.num_free_blocks <= self.limits.num_blocks
        assert self.policy.num_running <= self.limits.max_batch_requests
        assert all(count == 1 for name, count in self.ended.items() if name != "unknown")
        if not self.policy.num_running:
            assert self.policy.num_free_blocks == self.limits.num_blocks

    def teardown(self) -> None:
        """Nobody starves: left alone, everything alive ends in a bounded number of turns, the oldest first to advance."""
        if not hasattr(self, "policy"):
            return
        work = sum(len(request.prompt) + request.sampling.max_new_tokens for request, _ in self.alive.values())
        for _ in range(4 * (work + 1) * (len(self.alive) + 1)):
            self.turns(1)
        assert not self.alive
        assert self.policy.is_idle
        assert self.policy.num_free_blocks == self.limits.num_blocks


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
