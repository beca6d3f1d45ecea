"""What a rank does when the front asks something of its whole replica."""

from typing import final

import msgspec

from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ParallelRuntimeError
from parallel_runtime.serving.controls import (
    Answer,
    Control,
    ControlAction,
    FlushCache,
    Health,
    LoadWeights,
    Pause,
    Profile,
    ReceiveWeights,
    Resume,
    Sleep,
    Status,
    SwapWeights,
    WakeUp,
)
from parallel_runtime.serving.policy import SchedulingPolicy
from parallel_runtime.serving.tracing import RankTracer
from parallel_runtime.serving.weight_transfer import weight_context
from parallel_runtime.serving.worker import TpModelWorker

__all__ = ["Operator"]


@final
class Operator:
    """Does one control after the other, between batches; every rank of the replica has one and does the same.

    Args:
        ctx: Open context of this rank. Borrowed.
        worker: This rank's worker. Borrowed.
        policy: The requests of the replica. Borrowed.
    """

    def __init__(self, ctx: ParallelContext, worker: TpModelWorker, policy: SchedulingPolicy) -> None:
        self._ctx = ctx
        self._worker = worker
        self._policy = policy
        self._tracer = RankTracer(ctx, worker)
        self._is_paused = False

    @property
    def holds(self) -> bool:
        """Whether nothing is to be computed now."""
        return self._is_paused or self._worker.weights.is_asleep

    def status(self) -> Status:
        """How the replica is doing."""
        policy, weights = self._policy, self._worker.weights
        return Status(
            num_waiting=policy.num_waiting,
            num_running=policy.num_running,
            num_free_blocks=policy.num_free_blocks,
            num_cached_blocks=policy.num_cached_blocks,
            num_reused_tokens=policy.num_reused_tokens,
            weights_version=weights.version,
            num_preemptions=policy.num_preemptions,
            is_paused=self._is_paused,
            is_asleep=weights.is_asleep,
        )

    def do(self, control: Control) -> Answer:
        """Do what is asked. An error is answered, and leaves everything as it was.

        Args:
            control: Equal on every rank of the replica.

        Returns:
            The answer, which the leader sends.

        Collective: as the action needs; all ranks of the replica, or of all replicas that compute in step.
        """
        answer = Answer(number=control.number, status=self.status())
        try:
            answer = self._do(control.action, answer)
        except ParallelRuntimeError as exc:
            answer = msgspec.structs.replace(answer, error=f"{type(exc).__name__}: {exc}")
        return msgspec.structs.replace(answer, status=self.status())

    def _do(self, action: ControlAction, answer: Answer) -> Answer:
        worker, policy = self._worker, self._policy
        match action:
            case Pause():
                self._is_paused = True
            case Resume():
                self._is_paused = False
            case FlushCache():
                policy.forget_prefixes()
            case LoadWeights() | ReceiveWeights() | SwapWeights():
                self._update(action)
            case Sleep():
                worker.sleep()
                policy.restart()
            case WakeUp():
                worker.wake()
            case Profile():
                return self._profile(action, answer)
            case Health():
                pass
        return answer

    def _profile(self, action: Profile, answer: Answer) -> Answer:
        if not action.is_on:
            profile = self._worker.profile()
            return msgspec.structs.replace(answer, profile=profile, trace=self._tracer.stop(profile))
        if action.records:
            self._tracer.start()
        self._worker.timeline.start()
        return answer

    def _update(self, action: LoadWeights | ReceiveWeights | SwapWeights) -> None:
        worker = self._worker
        match action:
            case LoadWeights(path=path):
                worker.weights.load(path)
            case ReceiveWeights():
                self._receive(action)
            case SwapWeights(version=None):
                worker.weights.drop()
            case SwapWeights(version=version):
                worker.swap_weights(version)
                self._policy.restart()
                self._policy.weights_version = worker.weights.version

    def _receive(self, action: ReceiveWeights) -> None:
        rank = action.num_senders + action.first_receiver + self._ctx.rank
        world_size = action.num_senders + action.num_receivers
        with weight_context(rank, world_size, host=action.host, port=action.port, config=self._ctx.config) as common:
            self._worker.weights.receive(common.world, num_senders=action.num_senders)
