"""The loop of one rank: the leader of a replica reads requests, everyone runs the same policy on the same steps.

All that decides anything reaches the ranks in ``Step`` messages from the leader: requests, aborts, tokens of the last batch. A
rank has no clock and no source of requests of its own, so batches are equal everywhere by construction. Results leave from the
leader only. With several stages as many batches are under way: the leader asks for a result only when nothing more can start.
While there is nothing to do the leader sleeps on its link and the others sleep in the receive of the next step; an empty step
well within the control deadline tells them that the leader lives. Replicas know nothing of each other, except where experts span
them: there the leaders agree on every turn (``lockstep``), before it reaches the other ranks.
"""

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar, final

import msgspec

from parallel_runtime.comm import Channel, GroupCoordinator
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError
from parallel_runtime.serving.batch import Batch
from parallel_runtime.serving.controls import Control
from parallel_runtime.serving.leader import LeaderDesk
from parallel_runtime.serving.lockstep import Lockstep
from parallel_runtime.serving.messages import FinishReason, Ready, Step, StepOutput
from parallel_runtime.serving.operator import Operator
from parallel_runtime.serving.policy import SchedulingPolicy
from parallel_runtime.serving.worker import TpModelWorker

__all__ = ["Scheduler"]

_HEARTBEATS_PER_DEADLINE = 4
_T = TypeVar("_T")


@final
class Scheduler:
    """Serves one replica from one of its ranks.

    Args:
        ctx: Open context of this rank. Borrowed.
        worker: This rank's worker.
        link: To the front process; on the leader of the replica, and there alone.
        observer: Called with every batch before it runs, also with one without tokens; for tests and traces.

    Attributes:
        policy: The requests of the replica; equal on all of its ranks after every step.

    Raises:
        ArgumentError: A leader without a link, or a link on another rank.
    """

    def __init__(
        self,
        ctx: ParallelContext,
        worker: TpModelWorker,
        *,
        link: Connection | None = None,
        observer: Callable[[Batch], None] | None = None,
    ) -> None:
        if (link is not None) != worker.is_leader:
            raise ArgumentError(
                f"rank {ctx.rank} {'leads' if worker.is_leader else 'does not lead'} its replica; leaders alone have a link"
            )
        self.policy = SchedulingPolicy(worker.limits)
        self._worker = worker
        self._observer = observer
        self._operator = Operator(ctx, worker, self.policy)
        self._desk = None if link is None else self._open_desk(link)
        self._lockstep = Lockstep(ctx.dp) if link is not None and worker.is_in_lockstep else None
        self._control_s = ctx.config.deadlines.control_s
        self._dp_rank = ctx.coordinate.dp
        self._answers_at = ctx.answers_at()
        self._is_starved = False
        self._steps: list[Channel[Step]] = _open_lines(worker.replica, "steps", Step)
        self._controls: list[Channel[Control]] = _open_lines(worker.replica, "controls", Control)

    def run(self) -> None:
        """Serve until the front process says so, or is gone; in lock-step, until all leaders have heard so.

        Raises:
            PeerError: A rank of the replica, or in lock-step of another one, failed or left.

        Collective: one message per step and those of the worker; all ranks of the replica, and in lock-step all leaders.
        """
        self._say_ready()
        while not self._turn():
            pass
        if self._desk is not None:
            for _ in range(self.policy.num_under_way):
                self._worker.finish()
        self._worker.replica.barrier()  # nobody leaves while a peer still takes what it sent

    def _turn(self) -> bool:
        """One step; whether it was the last."""
        step = self._steps[0].recv(timeout_s=self._control_s) if self._desk is None else self._collect(self._desk)
        started_s = self._worker.timeline.now()
        if self._lockstep is None:
            self._tell(step)
            self._take(step)
            batch = self._schedule(step)
        else:
            self._take(step)
            batch = self._schedule(step)
            step = self._agree(step, batch, self._lockstep)
            self._tell(step)
        self._worker.timeline.add("schedule", started_s)
        if batch.chunks or step.together:
            self._compute(batch)
        self._is_starved = not batch.chunks
        for _ in range(step.num_controls):
            self._control()
        return step.shutdown

    def _say_ready(self) -> None:
        told = self._worker.replica.all_gather_object((self._worker.describe(), self._answers_at))
        if self._desk is not None:
            limits = self._worker.limits
            ready = Ready(
                dp_rank=self._dp_rank,
                num_blocks=limits.num_blocks,
                page_size=limits.page_size,
                max_request_tokens=limits.max_request_tokens,
                vocab_size=self._worker.vocab_size,
                ranks=tuple(line for line, _ in told),
                addresses=tuple(address for _, address in told),
            )
            self._desk.send(ready)

    def _open_desk(self, link: Connection) -> LeaderDesk:
        return LeaderDesk(link, self.policy, vocab_size=self._worker.vocab_size, status=self._operator.status)

    def _collect(self, desk: LeaderDesk) -> Step:
        can_sleep = self._is_at_rest(desk) if self._lockstep is None else self._lockstep.is_asleep
        wait_s = self._control_s / _HEARTBEATS_PER_DEADLINE if can_sleep and not desk.is_over else 0.0
        sampled = self._worker.finish() if self._must_finish() else None
        started_s = 0.0 if wait_s else self._worker.timeline.now()
        step = desk.collect(sampled, wait_s=wait_s)
        if (self._operator.holds or desk.controls) and not step.shutdown:
            is_quiet = self.policy.num_under_way == (sampled is not None)
            step = msgspec.structs.replace(step, holds=True, num_controls=len(desk.controls) if is_quiet else 0)
        self._worker.timeline.add("schedule", started_s)
        return step

    def _is_at_rest(self, desk: LeaderDesk) -> bool:
        """Whether nothing happens until the front says something."""
        return not desk.controls and (self.policy.is_idle or (self._operator.holds and not self.policy.num_under_way))

    def _schedule(self, step: Step) -> Batch:
        return Batch() if step.holds or (step.shutdown and self._lockstep is None) else self.policy.schedule()

    def _control(self) -> None:
        """Do the next thing the front asked for, on every rank."""
        if self._desk is None:
            self._operator.do(self._controls[0].recv(timeout_s=self._control_s))
            return
        control = self._desk.controls.popleft()
        for line in self._controls:
            line.send(control)
        self._desk.send(self._operator.do(control))

    def _agree(self, step: Step, batch: Batch, lockstep: Lockstep) -> Step:
        """The step as all leaders want it: computed by every replica if by any, and the last one when all may leave."""
        desk = self._desk
        assert desk is not None
        turn = lockstep.agree(
            starts=bool(batch.chunks),
            is_busy=not self._is_at_rest(desk),
            num_told=desk.num_told,
            leaves=desk.is_over,
            num_controls=step.num_controls,
        )
        return msgspec.structs.replace(step, together=turn.together, shutdown=turn.is_over, num_controls=turn.num_controls)

    def _tell(self, step: Step) -> None:
        if self._desk is not None:
            for line in self._steps:
                line.send(step)

    def _must_finish(self) -> bool:
        """Whether nothing more can start before the oldest batch under way is complete."""
        policy = self.policy
        is_full = policy.num_under_way == policy.limits.num_slots
        return policy.num_under_way > 0 and (is_full or self._is_starved or not policy.has_work)

    def _take(self, step: Step) -> None:
        outputs = [] if step.sampled is None else self.policy.complete(step.sampled)
        for request_id in step.aborts:
            if self.policy.abort(request_id):
                outputs.append(StepOutput(request_id=request_id, finish_reason=FinishReason.ABORT))
        for request in step.requests:
            self.policy.add(request)
        if self._desk is not None:
            for output in outputs:
                self._desk.send(output)
            self._desk.tell_status()

    def _compute(self, batch: Batch) -> None:
        if self._observer is not None:
            self._observer(batch)
        self._worker.start(batch)


def _open_lines(replica: GroupCoordinator, name: str, schema: type[_T]) -> list[Channel[_T]]:
    """One line from the leader to each other rank; a rank that computes does not hold up the leader's next message."""
    peers = range(1, replica.world_size) if replica.is_first_rank else (0,)
    return [replica.channel(name, schema, peer=peer) for peer in peers]
