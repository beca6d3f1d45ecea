"""From what the ranks of a group say of themselves to one error that tells whose fault it is. Pure: text in, text out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from parallel_runtime.comm.diagnosis import Failure
from parallel_runtime.context.reports import Done, Report
from parallel_runtime.errors import CollectiveMismatchError, PeerError, PeerLostError, PeerTimeoutError

__all__ = ["Departure", "Evidence", "tell"]

_SAME_ON_ALL: Final = frozenset(
    ("all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "broadcast_", "reduce", "gather")
)
"""Operations whose tensor is of the same shape and dtype on every member."""
_COLLECTIVES: Final = _SAME_ON_ALL | frozenset(
    "all_gatherv reduce_scatterv all_to_allv scatter barrier broadcast_object all_gather_object broadcast_tensor_dict".split()
)
_MOST: Final = 8
"""Ranks that are told about in full."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Why a rank will do nothing more in its context.

    Attributes:
        text: A clause that follows "rank N".
        follows: Whether it went because of another rank, so that it is not the cause.
        is_normal: Whether it meant to leave; it is the cause only where nobody failed.
        blamed: World ranks that it blamed, where it follows.
    """

    text: str
    follows: bool = False
    is_normal: bool = False
    blamed: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What could be found out about the other ranks.

    Attributes:
        departures: Of ranks that are gone.
        reports: Of ranks that answered.
        silent: Why others did not, as a clause that follows "rank N".
        notes: Further lines.
    """

    departures: Mapping[int, Departure]
    reports: Mapping[int, Report]
    silent: Mapping[int, str]
    notes: Sequence[str] = ()


def tell(failure: Failure, suspects: Sequence[int], evidence: Evidence) -> PeerError:
    """Make the error of an operation that failed because of a peer.

    Args:
        failure: The operation, and what its communicator raised.
        suspects: World ranks that it may have waited for.
        evidence: What is known of them.

    Returns:
        The error; its ``ranks`` are those at fault.
    """
    head = f"{failure.group} seq {failure.sequence} {failure.what}"
    members = f"of {list(failure.ranks)}"
    mine = Done(failure.group, failure.sequence, failure.operation, failure.what, failure.seconds, False)
    error: PeerError
    gone = [rank for rank in suspects if rank in evidence.departures]
    blamed = [rank for rank in suspects if not _takes_part(failure, mine, evidence.reports.get(rank))]
    causes = [rank for rank in gone if rank in blamed and not evidence.departures[rank].follows]
    causes = [rank for rank in causes if not evidence.departures[rank].is_normal] or causes
    if odd := _odd_ones(failure, mine, evidence.reports):
        entered = "; ".join(f"rank {rank} entered {other.what}" for rank, other in odd.items())
        error = CollectiveMismatchError(
            f"{head} waited {_seconds(failure)}, but the members {members} entered different operations: "
            f"rank {failure.rank} entered {failure.what}; {entered}.{_body(failure, list(odd), evidence)}"
        )
        error.ranks = tuple(odd)
        return error
    if causes or (gone and all(rank in gone for rank in blamed)):
        passed_on = sorted({rank for each in gone for rank in evidence.departures[each].blamed} - {failure.rank})
        lost = causes or blamed or gone
        whose = f", which had failed because of {_ranks(passed_on)}" if passed_on and not causes else ""
        body = _body(failure, lost, evidence)
        error = PeerLostError(f"{head} lost {_ranks(lost)} {members} after {_seconds(failure)}{whose}.{body}")
        error.ranks = tuple(causes or passed_on or lost)
        return error
    gave_up = [rank for rank in suspects if rank not in blamed]
    whom = f"{_ranks(blamed or suspects)} {members}"
    body = _body(failure, [*blamed, *gave_up], evidence)
    if isinstance(failure.error, PeerTimeoutError) or (blamed and _timed_out(gave_up, evidence.reports)):
        error = PeerTimeoutError(f"{head} waited {_seconds(failure)} for {whom}.{body}")
    elif isinstance(failure.error, PeerLostError):
        error = PeerLostError(f"{head} lost the connection to {whom} after {_seconds(failure)}.{body}")
    else:
        error = PeerError(f"{head}: {failure.error}; it waited {_seconds(failure)} for {whom}.{body}")
    error.ranks = tuple(blamed)
    return error


def _takes_part(failure: Failure, mine: Done, report: Report | None) -> bool:
    """Whether a rank is in the same operation, or was and gave up."""
    connected = report and report.connected(failure.ranks)
    if not connected or not report:
        return False
    if any(failed.startswith(f"{mine.group} seq {mine.sequence} ") for failed in report.failures):
        return True
    current = connected.tail[-1] if connected.tail else None
    is_inside = current is not None and not current.is_over
    return bool(is_inside and current and (current.operation, current.sequence) == (mine.operation, mine.sequence))


def _timed_out(ranks: Sequence[int], reports: Mapping[int, Report]) -> bool:
    return any(" waited " in failed for rank in ranks if rank in reports for failed in reports[rank].failures)


def _odd_ones(failure: Failure, mine: Done, reports: Mapping[int, Report]) -> dict[int, Done]:
    """Members that entered another collective than this one, in its place."""
    found = {}
    for rank, report in reports.items():
        connected = report.connected(failure.ranks)
        tail = connected.tail if connected else ()
        if any(entry.operation not in _COLLECTIVES for entry in (mine, *tail)):
            continue  # messages are not numbered alike on both ends
        other = next((entry for entry in tail if entry.sequence == mine.sequence), None)
        if other is not None and _differ(mine, other):
            found[rank] = other
    return found


def _differ(mine: Done, other: Done) -> bool:
    return mine.operation != other.operation or (mine.operation in _SAME_ON_ALL and mine.what != other.what)


def _body(failure: Failure, ranks: Sequence[int], evidence: Evidence) -> str:
    lines = [line for rank in ranks[:_MOST] for line in _about(failure, rank, evidence)]
    lines += getattr(failure.error, "__notes__", [])
    if len(ranks) > _MOST:
        lines.append(f"and {len(ranks) - _MOST} more ranks")
    return "".join(f"\n  {line}" for line in (*lines, *evidence.notes))


def _about(failure: Failure, rank: int, evidence: Evidence) -> list[str]:
    if rank in evidence.departures:
        return [f"rank {rank} {evidence.departures[rank].text}"]
    report = evidence.reports.get(rank)
    if report is None:
        return [f"rank {rank} {evidence.silent.get(rank, 'did not answer')}"]
    mine = Done(failure.group, failure.sequence, failure.operation, failure.what, failure.seconds, False)
    who = f"rank {rank} (pid {report.pid} on {report.host})"
    if _takes_part(failure, mine, report):
        failed = next((text for text in report.failures if text.startswith(f"{mine.group} seq {mine.sequence} ")), "")
        return [f"{who} {f'gave up: {failed}' if failed else 'waits in the same operation'}"]
    is_here = report.inside.startswith(f"{failure.group} seq ")
    where = f"is in {report.inside}" if report.inside else "is in no operation of a group"
    lines = [f"{who} is alive and {where}{'' if is_here or not report.inside else f', not in {failure.group}'}:"]
    lines.append(f"  {' -> '.join(report.stack) or 'its thread has ended'}")
    if recent := "; ".join(map(str, report.recent())):
        lines.append(f"last operations of rank {rank}: {recent}")
    lines += [f"rank {rank} has seen: {text}" for text in report.failures[-1:]]
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _seconds(failure: Failure) -> str:
    return f"{failure.seconds:.1f} s" if failure.seconds >= 1 else f"{failure.seconds:.2f} s"
