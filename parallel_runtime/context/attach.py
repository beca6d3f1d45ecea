"""Looking at a job from outside: who its ranks are, and what they are in. Reads the store, asks the monitors, changes nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from parallel_runtime.comm.c10d import Store, connect_store, prefix_store
from parallel_runtime.context.control import Address, ask_all
from parallel_runtime.context.member import Member, compare_members
from parallel_runtime.context.reports import Report
from parallel_runtime.errors import PeerError

__all__ = ["LiveContext", "attach"]

_ASK_S: Final = 3.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveContext:
    """One context of a running job.

    Attributes:
        uid: Its identity, ``""`` while its ranks have not met.
        problem: Why it did not come together, ``""`` if it did.
        members: The ranks that joined, as they described themselves.
        left: Why a rank left, by rank.
        reports: What the ranks that answer say of themselves.
        silent: Why others did not answer, by rank, as a clause.
    """

    uid: str
    problem: str
    members: dict[int, Member]
    left: dict[int, str]
    reports: dict[int, Report]
    silent: dict[int, str]

    @property
    def difference(self) -> str:
        """Which ranks were told something else than the others, ``""`` for none."""
        return compare_members([self.members[rank] for rank in sorted(self.members)])

    def lines(self) -> list[str]:
        """The four answers: who is there, what came up, who uses it, in which operation.

        Returns:
            Lines for people.
        """
        lines = [f"context {self.uid or '(not met yet)'}: {len(self.members)} ranks joined"]
        if self.problem:
            lines.append(f"  it did not come together: {self.problem}")
        lines.append(f"  settings: {self.difference or 'equal on all of them'}")
        for connected in sorted({c.ranks for report in self.reports.values() for c in report.connections}):
            unknown = [rank for rank in connected if rank in self.reports and not self.reports[rank].connected(connected)]
            lines.append(
                f"  group of ranks {list(connected)}: {f'not open on {unknown}' if unknown else 'open on all that answer'}"
            )
        return lines + [line for rank in sorted(self.members) for line in self._about(rank)]

    def _about(self, rank: int) -> list[str]:
        who = f"  rank {rank} ({self.members[rank].is_where})"
        if rank in self.left:
            return [f"{who} has left: {self.left[rank]}"]
        if rank not in self.reports:
            return [f"{who} {self.silent.get(rank, 'has not opened its monitor')}"]
        report = self.reports[rank]
        current = next((c.current for c in report.connections if c.current), None)
        doing = f"is in {report.inside}" if report.inside else "is in no operation of a group"
        lines = [f"{who} {doing}{f' since {current.seconds:.1f} s' if current and report.inside else ''}"]
        lines.append(f"    {' -> '.join(report.stack)}")
        lines += [f"    before: {done}" for done in report.recent()]
        return lines + [f"    it has seen: {failure}" for failure in report.failures]


def attach(host: str, port: int, *, uid: str = "", timeout_s: float = 5.0) -> list[LiveContext]:
    """Look at the contexts that meet in a store.

    Args:
        host: Where the store listens.
        port: Its port.
        uid: Only the context with this identity, or one that starts like it.
        timeout_s: How long to look for the store, in seconds.

    Returns:
        The contexts, oldest first.

    Raises:
        PeerTimeoutError: No store answers there.
        PeerError: The store went away.
    """
    store = connect_store(host, port, timeout_s=timeout_s)
    try:
        rooms = sorted({key.rpartition("/member/")[0] for key in store.list_keys() if "/member/" in key})
        found = [_look(prefix_store(store, room), store.list_keys(), room) for room in rooms]
    except RuntimeError as error:
        raise PeerError(f"the store at {host}:{port} went away: {str(error).splitlines()[0]}") from error
    return [context for context in found if context.uid.startswith(uid)]


def _look(room: Store, keys: Sequence[str], prefix: str) -> LiveContext:
    def ranks_with(what: str) -> list[int]:
        start = f"{prefix}/{what}/"
        return sorted(
            int(key.removeprefix(start)) for key in keys if key.startswith(start) and key.removeprefix(start).isdecimal()
        )

    verdict: dict[str, str] = json.loads(room.get("verdict")) if f"{prefix}/verdict" in keys else {}
    left = {rank: room.get(f"left/{rank}").decode() for rank in ranks_with("left")}
    addresses = {rank: Address.from_json(room.get(f"monitor/{rank}")) for rank in ranks_with("monitor") if rank not in left}
    reports = ask_all(addresses, _ASK_S)
    return LiveContext(
        uid=verdict.get("uid", ""),
        problem=verdict.get("error", ""),
        members={rank: Member.from_json(room.get(f"member/{rank}")) for rank in ranks_with("member")},
        left=left,
        reports=reports,
        silent={rank: _silence(address) for rank, address in addresses.items() if rank not in reports},
    )


def _silence(address: Address) -> str:
    if address.is_ended:
        return "has ended without a word: killed, or crashed"
    return "is stopped (SIGSTOP, or a debugger)" if address.is_stopped else f"did not answer within {_ASK_S:g} s"
