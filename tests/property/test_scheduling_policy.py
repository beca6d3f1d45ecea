"""The scheduling policy under any order of events: nothing leaks, nothing is lost or served twice, nobody starves.

A model cache writes down which token of which position was computed into which place, so that a block taken over from another
request is known to hold just what its key promised.
"""

from collections import Counter
from itertools import chain

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parallel_runtime.errors import QueueFullError
from parallel_runtime.serving.batch import Batch
from parallel_runtime.serving.blocks import blocks_for
from parallel_runtime.serving.live_request import HEAD_START
from parallel_runtime.serving.messages import Request
from parallel_runtime.serving.policy import PolicyLimits, SchedulingPolicy
from parallel_runtime.serving.sampling_params import SamplingParams

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
        prefix_reuse=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        page_size: int,
        requests: int,
        extra: int,
        slots: int,
        waiting: int,
        first: list[tuple[int, int]],
        prefix_reuse: bool,
    ) -> None:
        self.limits = PolicyLimits(
            num_blocks=num_blocks,
            page_size=page_size,
            max_batch_requests=requests,
            max_batch_tokens=requests + extra,
            max_waiting=waiting,
            max_request_tokens=30,
            num_slots=slots,
            prefix_reuse=prefix_reuse,
        )
        self.policy, self.twin = SchedulingPolicy(self.limits), SchedulingPolicy(self.limits)
        self.alive: dict[str, tuple[Request, list[int]]] = {}
        self.under_way: list[Batch] = []
        self.ended: Counter[str] = Counter()
        self.num_made = 0
        self.next_token = 1
        self.cache: dict[int, tuple[int, ...]] = {}
        for prompt, new in first:
            self.add(prompt, new, kind=1, priority=0)

    @rule(prompt=st.integers(1, 12), new=st.integers(1, 6), kind=st.integers(1, 2), priority=st.integers(-1, 1))
    def add(self, prompt: int, new: int, kind: int, priority: int) -> None:
        room = min(self.limits.max_request_tokens, self.limits.num_blocks * self.limits.page_size)
        prompt, new = min(prompt, room), min(new, room - min(prompt, room))
        if new < 1:
            return
        name = f"r{self.num_made}"
        sampling = SamplingParams(max_new_tokens=new, stop_token_ids=(STOP,))
        tokens = tuple(range(kind, prompt + kind))
        request = Request(request_id=name, prompt=tokens, sampling=sampling, priority=priority)
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
        self.compute(batch)
        if batch.chunks:
            self.under_way.append(batch)

    def compute(self, batch: Batch) -> None:
        """Every place holds the tokens up to it; a chunk reads those before it and writes its own, which no other may hold."""
        size = self.limits.page_size
        readers = Counter(chain.from_iterable(chunk.blocks for chunk in batch.chunks))
        for chunk in batch.chunks:
            request, made = self.alive[chunk.request_id]
            known = (*request.prompt, *made)
            for position in range(chunk.start, chunk.length):
                block = chunk.blocks[position // size]
                self.cache[block * size + position % size] = known[: position + 1]
                if position == chunk.start:
                    assert readers[block] == 1 or position % size == 0, "a block that is not full is its writer's alone"
        for chunk in batch.chunks:
            request, made = self.alive[chunk.request_id]
            known = (*request.prompt, *made)
            for position in range(chunk.length):
                assert self.cache[chunk.blocks[position // size] * size + position % size] == known[: position + 1]

    @rule()
    def forget(self) -> None:
        assert self.policy.forget_prefixes() == self.twin.forget_prefixes()
        assert self.policy.num_cached_blocks == 0

    @precondition(lambda self: not self.under_way)
    @rule()
    def restart(self) -> None:
        self.policy.restart()
        self.twin.restart()
        self.cache.clear()
        assert self.policy.num_running == self.policy.num_cached_blocks == 0

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
        assert 0 <= self.policy.num_cached_blocks <= self.policy.num_free_blocks
        assert self.limits.prefix_reuse or not self.policy.num_cached_blocks
        assert self.policy.num_running <= self.limits.max_batch_requests
        assert all(count == 1 for name, count in self.ended.items() if name != "unknown")
        if not self.policy.num_running:
            assert self.policy.num_free_blocks == self.limits.num_blocks

    def teardown(self) -> None:
        """Nobody starves: whoever waits ends in a bounded number of turns, under a flood of urgent requests that never ends."""
        if not hasattr(self, "policy"):
            return
        old = set(self.alive)
        room = min(self.limits.max_request_tokens, self.limits.num_blocks * self.limits.page_size)
        prompt = min(room - 1, 2)
        work = sum(len(request.prompt) + request.sampling.max_new_tokens for request, _ in self.alive.values())
        flood = 2 * HEAD_START + self.limits.max_batch_requests
        for _ in range(4 * (work + 3 * flood + 1) * (len(self.alive) + 1)):
            if not old & set(self.alive):
                break
            while prompt and self.policy.num_waiting < self.limits.max_waiting:
                self.add(prompt, 1, kind=3, priority=1)
            self.turns(1)
        assert not old & set(self.alive)
        for _ in range(8 * (len(self.alive) + 1)):
            self.turns(1)
        assert not self.alive
        assert self.policy.is_idle
        assert self.policy.num_free_blocks == self.limits.num_blocks


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
