"""What the front process asks of whole replicas, and what their leaders answer: plain data, beside the requests.

A control is done by every rank of the replica in the same turn, when no batch is under way. Requests wait meanwhile; none fails.
"""

from typing import TypeAlias

import msgspec

from parallel_runtime.context.trace_document import Clock, RankTrace

__all__ = [
    "Answer",
    "Control",
    "ControlAction",
    "FlushCache",
    "Health",
    "LoadWeights",
    "Pause",
    "Profile",
    "RankProfile",
    "ReceiveWeights",
    "ReplicaTrace",
    "Resume",
    "Sleep",
    "Span",
    "Status",
    "SwapWeights",
    "WakeUp",
]


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Compute nothing until ``Resume``. Requests are still taken, and wait."""


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Go on after ``Pause``."""


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Forget the beginnings of earlier requests. What runs goes on."""


class LoadWeights(msgspec.Struct, frozen=True, tag=True):
    """Read other weights, and keep them beside those that serve until ``SwapWeights``.

    Attributes:
        path: Of a model with the same config, readable by every rank; or of one safetensors file with any of its tensors.
    """

    path: str


class ReceiveWeights(msgspec.Struct, frozen=True, tag=True):
    """Take other weights from the ranks of a trainer, and keep them beside those that serve until ``SwapWeights``.

    Attributes:
        host: Where the trainer's first rank listens.
        port: Its TCP port.
        num_senders: The trainer's ranks, which come first in the common group.
        num_receivers: Serving ranks that take part, over all replicas.
        first_receiver: Number of this replica's first rank among them.
    """

    host: str
    port: int
    num_senders: int
    num_receivers: int
    first_receiver: int = 0


class SwapWeights(msgspec.Struct, frozen=True, tag=True):
    """End an update: serve with the weights that were loaded or received, or drop them.

    Requests that run are computed again from their first token with the new weights, and keep what they have made.

    Attributes:
        version: Of the new weights; ``None`` drops them.
    """

    version: int | None


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Give back the memory of weights and KV cache. Requests wait until ``WakeUp``."""


class WakeUp(msgspec.Struct, frozen=True, tag=True):
    """Take the memory again, with the weights of before. Requests that ran are computed again."""


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Begin to write down what every rank does when, or end it and tell.

    Attributes:
        is_on: Whether to begin.
        records: When it begins, whether every operation of every group is kept too, for a trace.
    """

    is_on: bool
    records: bool = False


class Health(msgspec.Struct, frozen=True, tag=True):
    """Say how it goes. The leader answers in its next turn, whatever is under way."""


ControlAction: TypeAlias = (
    Pause | Resume | FlushCache | LoadWeights | ReceiveWeights | SwapWeights | Sleep | WakeUp | Profile | Health
)
"""Everything that can be asked."""


class Control(msgspec.Struct, frozen=True, tag=True):
    """Front to leader, and leader to its ranks: do this.

    Attributes:
        number: Of the question; the answer has the same.
        action: What to do.
    """

    number: int
    action: ControlAction


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One stretch of work of one rank.

    Attributes:
        what: ``"compute"``, ``"receive"`` (waiting for another stage) or ``"schedule"``.
        start_s: When it began, on this machine's monotonic clock.
        end_s: When it ended.
        num_tokens: Of the batch.
    """

    what: str
    start_s: float
    end_s: float
    num_tokens: int = 0


class RankProfile(msgspec.Struct, frozen=True):
    """What one rank did between the two ``Profile`` messages.

    Attributes:
        rank: In its world.
        stage: Its pipeline stage.
        seconds: From the first message to the last.
        busy: Share of the time from the first batch's beginning to the last one's end in which it computed.
        scheduling: Share of the same time that went into choosing batches and handling messages.
        spans: What it did, in order; the first ``MAX_SPANS`` of it.
    """

    rank: int
    stage: int
    seconds: float
    busy: float
    scheduling: float
    spans: tuple[Span, ...] = ()


class Status(msgspec.Struct, frozen=True):
    """How a replica is doing.

    Attributes:
        num_waiting: Requests that wait.
        num_running: Requests that hold blocks.
        num_free_blocks: Blocks that no request holds.
        num_cached_blocks: Those of them that hold a known beginning.
        num_reused_tokens: Prompt tokens so far that were known already.
        num_preemptions: How often a request was put back so far, to be computed again.
        weights_version: Of the weights that serve.
        is_paused: Whether it waits for ``Resume``.
        is_asleep: Whether it waits for ``WakeUp``.
    """

    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_cached_blocks: int
    num_reused_tokens: int
    weights_version: int
    num_preemptions: int = 0
    is_paused: bool = False
    is_asleep: bool = False


class ReplicaTrace(msgspec.Struct, frozen=True):
    """What the ranks of a replica that one leader leads recorded.

    Attributes:
        parts: One of each rank.
        clocks: How theirs differ from the leader's.
        told_s: When the leader told, by its ``time.perf_counter``.
    """

    parts: list[RankTrace]
    clocks: list[Clock]
    told_s: float


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Leader to front: it is done, or why not; then everything is as before.

    Attributes:
        number: Of the question.
        error: Why it could not be done; ``None`` where it was.
        status: For every question.
        profile: For a ``Profile`` that ends one: one of each rank of the replica.
        trace: For a ``Profile`` that ends one with ``records``.
    """

    number: int
    status: Status
    error: str | None = None
    profile: tuple[RankProfile, ...] = ()
    trace: ReplicaTrace | None = None
