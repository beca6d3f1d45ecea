"""Members on several hosts: shared memory inside a host, a backend between hosts.

Each host has a leader, its first member in group order. What every member needs crosses the network once per host, and the rest
moves at the speed of memory. What only some members need goes straight.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, final

import torch
from torch import Tensor

from parallel_runtime.comm.communicator import Communicator, Operation, ReduceOp, Work
from parallel_runtime.comm.roll_call import Entered, RollCall
from parallel_runtime.comm.tensors import as_bytes, fold
from parallel_runtime.errors import CollectiveMismatchError, PeerError

__all__ = ["HierarchicalCommunicator", "HostSplit"]

_TAG: Final = 1 << 30
"""Above all tags of messages."""


@final
class HostSplit:
    """How the members of a group lie on hosts; equal on every member.

    Args:
        hosts: The host of every member, in group order.
        rank_in_group: This member.

    Attributes:
        members: Per host, in the order of their first members, its members.
        host: Number of this member's host.
        local: Members of this host.
        leaders: The first member of every host.
    """

    def __init__(self, hosts: Sequence[Hashable], rank_in_group: int) -> None:
        names = list(dict.fromkeys(hosts))
        self.members = tuple(tuple(member for member, host in enumerate(hosts) if host == name) for name in names)
        self.host = names.index(hosts[rank_in_group])
        self.local = self.members[self.host]
        self.leaders = tuple(members[0] for members in self.members)
        self._place = {member: (host, spot) for host, members in enumerate(self.members) for spot, member in enumerate(members)}

    def host_of(self, member: int) -> int:
        """Number of the host of ``member``."""
        return self._place[member][0]

    def spot_of(self, member: int) -> int:
        """Position of ``member`` among the members of its host."""
        return self._place[member][1]


@final
class _Leaders:
    """The leaders of all hosts, who talk over connections that all members have. Results are combined in the order of hosts."""

    def __init__(self, flat: Communicator, split: HostSplit, roll: RollCall | None) -> None:
        self._flat = flat
        self._split = split
        self._roll = roll
        self._calls = 0
        self._host = split.host
        self._others = [(host, leader) for host, leader in enumerate(split.leaders) if host != split.host]

    def all_reduce_(self, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Each leader combines one part of all, and hands it to the others; what is small is handed over whole."""
        all_rows = self._called(Entered("all_reduce", tensor.dtype, tensor.shape, op), tensor, timeout_s)
        if all_rows is not None:
            tensor.copy_(fold(all_rows, op))
            return
        parts = torch.tensor_split(tensor.view(-1), len(self._others) + 1)
        mine = parts[self._host]
        rows = mine.new_empty((len(parts), mine.numel()))
        rows[self._host] = mine
        self._exchange(parts, list(rows), timeout_s)
        mine.copy_(fold(rows, op))
        self._hand_on(parts, timeout_s)

    def all_gather(self, blocks: Sequence[Tensor], timeout_s: float) -> None:
        """Fill every block but this host's from its leader."""
        about = blocks[0][0]
        self._called(Entered("all_gather", about.dtype, about.shape), None, timeout_s)
        self._hand_on(blocks, timeout_s)

    def _hand_on(self, blocks: Sequence[Tensor], timeout_s: float) -> None:
        self._exchange([blocks[self._host]] * len(blocks), blocks, timeout_s)

    def broadcast_(self, tensor: Tensor, src: int, timeout_s: float) -> None:
        """From the leader of host ``src`` to the others."""
        rows = self._called(Entered("broadcast", tensor.dtype, tensor.shape, root=self._split.leaders[src]), tensor, timeout_s)
        if rows is not None:
            tensor.copy_(rows[src])
            return
        if src == self._host:
            works = [self._flat.isend(as_bytes(tensor), leader, _TAG) for _, leader in self._others]
        else:
            works = [self._flat.irecv(as_bytes(tensor), dict(self._others)[src], _TAG)]
        for work in works:
            work.wait(timeout_s)

    def _called(self, entered: Entered, payload: Tensor | None, timeout_s: float) -> Tensor | None:
        """Compare what the hosts enter, each of which has done so for its members."""
        if self._roll is None:
            return None
        try:
            rows = self._roll.call(
                entered,
                self._calls,
                payload,
                lambda rows, mine: self._exchange(list(mine), list(rows), timeout_s, mine[self._host]),
            )
        except CollectiveMismatchError as error:
            error.members = tuple(member for host in error.members for member in self._split.members[host])
            raise
        self._calls += 1
        return rows

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor], timeout_s: float, own: Tensor | None = None) -> None:
        """Send ``sent[host]`` to the leader of each other host, and fill ``received[host]`` from it, or with ``own``."""
        works = []
        if own is not None:
            received[self._host].copy_(own)
        for host, leader in self._others:
            if sent[host].numel():
                works.append(self._flat.isend(as_bytes(sent[host]), leader, _TAG))
            if received[host].numel():
                works.append(self._flat.irecv(as_bytes(received[host]), leader, _TAG))
        for work in works:
            work.wait(timeout_s)


@final
class HierarchicalCommunicator(Communicator):
    """all_reduce, all_gather, broadcast and barrier by way of the hosts' leaders; everything else straight between members.

    Args:
        split: Where the members are.
        rank_in_group: This member.
        flat: Connects all members.
        inside: Connects the members of this host; ``None`` where this one is alone.
        ranks: World ranks in group order, for errors; the members' positions by default.
        checked: Whether leaders compare what their hosts enter before it moves. Equal on all members.
    """

    kind = "shm in hosts, c10d between"

    def __init__(
        self,
        split: HostSplit,
        rank_in_group: int,
        *,
        flat: Communicator,
        inside: Communicator | None,
        ranks: Sequence[int] | None = None,
        checked: bool = True,
    ) -> None:
        self.world_size = flat.world_size
        self.rank_in_group = rank_in_group
        self._split = split
        self._flat = flat
        self._inside = inside
        for part in (flat, inside):
            if part is not None:
                part.join_traffic(self.traffic)
        roll = RollCall(split.host, [leader if ranks is None else ranks[leader] for leader in split.leaders]) if checked else None
        self._between = _Leaders(flat, split, roll) if rank_in_group in split.leaders else None

    def paths(self) -> str:
        """Those inside this host."""
        return "" if self._inside is None else f"inside a host {self._inside.paths()}"

    def supports(self, operation: Operation, dtype: torch.dtype, nbytes: int) -> bool:
        """What all of its parts support."""
        return all(part is None or part.supports(operation, dtype, nbytes) for part in (self._flat, self._inside))

    def all_reduce_(self, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Reduce on each host, over the leaders, and back; avg divides once, at the end, and halves are rounded once."""
        if tensor.dtype in (torch.float16, torch.bfloat16):
            wide = tensor.float()
            self.all_reduce_(wide, op, timeout_s)
            tensor.copy_(wide)
            return
        step = ReduceOp.SUM if op is ReduceOp.AVG else op
        with self._on_host():
            if self._inside is not None:
                self._inside.all_reduce_(tensor, step, timeout_s)
        if self._between is not None:
            with self._among_leaders():
                self._between.all_reduce_(tensor, step, timeout_s)
        self._spread(tensor, timeout_s)
        if op is ReduceOp.AVG:
            tensor.div_(self.world_size)

    def all_gather(self, output: Tensor, tensor: Tensor, timeout_s: float) -> None:
        """Gather on each host, exchange between leaders, and hand on what came."""
        split = self._split
        order = [member for members in split.members for member in members]
        is_in_order = order == sorted(order)
        rows = output if is_in_order else torch.empty_like(output)
        blocks = torch.split(rows, [len(members) for members in split.members])
        with self._on_host():
            if self._inside is None:
                blocks[split.host].copy_(tensor.unsqueeze(0))
            else:
                self._inside.all_gather(blocks[split.host], tensor, timeout_s)
        if self._between is not None:
            with self._among_leaders():
                self._between.all_gather(blocks, timeout_s)
        self._spread(rows, timeout_s)
        if not is_in_order:
            output[order] = rows

    def broadcast_(self, tensor: Tensor, src: int, timeout_s: float) -> None:
        """To the leader of the source's host, to the other leaders, and on each host from there."""
        split, source = self._split, self._split.host_of(src)
        if split.host == source:
            with self._on_host():
                if self._inside is not None:
                    self._inside.broadcast_(tensor, split.spot_of(src), timeout_s)
        if self._between is not None:
            with self._among_leaders():
                self._between.broadcast_(tensor, source, timeout_s)
        if split.host != source:
            self._spread(tensor, timeout_s)

    def barrier(self, timeout_s: float) -> None:
        """An all-reduce of one byte."""
        flag = torch.ones(1, dtype=torch.uint8)
        self.all_reduce_(flag, ReduceOp.MAX, timeout_s)

    def all_gatherv(self, outputs: Sequence[Tensor], tensor: Tensor, timeout_s: float) -> None:
        """Straight."""
        self._flat.all_gatherv(outputs, tensor, timeout_s)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """An all-reduce of which one row is kept."""
        work = tensor.clone()
        self.all_reduce_(work, op, timeout_s)
        output.copy_(work[self.rank_in_group])

    def all_to_allv(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout_s: float) -> None:
        """Straight."""
        self._flat.all_to_allv(outputs, inputs, timeout_s)

    def reduce(self, output: Tensor | None, tensor: Tensor, dst: int, op: ReduceOp, timeout_s: float) -> None:
        """Straight."""
        self._flat.reduce(output, tensor, dst, op, timeout_s)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, timeout_s: float) -> None:
        """Straight."""
        self._flat.gather(outputs, tensor, dst, timeout_s)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, timeout_s: float) -> None:
        """Straight."""
        self._flat.scatter(output, inputs, src, timeout_s)

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """Through memory to a member of this host, else straight."""
        part, peer = self._way_to(dst)
        return part.isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        """Through memory from a member of this host, else straight."""
        part, peer = self._way_to(src)
        return part.irecv(tensor, peer, tag)

    def end_vain_wait(self) -> None:
        """Between members that are connected straight."""
        self._flat.end_vain_wait()

    def close(self) -> None:
        """Close all parts."""
        for part in (self._inside, self._flat):
            if part is not None:
                part.close()

    def _way_to(self, member: int) -> tuple[Communicator, int]:
        if self._inside is not None and self._split.host_of(member) == self._split.host:
            return self._inside, self._split.spot_of(member)
        return self._flat, member

    def _spread(self, tensor: Tensor, timeout_s: float) -> None:
        """From the leader to the other members of this host."""
        if self._inside is not None:
            with self._on_host():
                self._inside.broadcast_(tensor, 0, timeout_s)

    @contextmanager
    def _on_host(self) -> Iterator[None]:
        local = self._split.local
        with _named(f"on this host, its members 0 to {len(local) - 1} are {local}", self.close, local):
            yield

    @contextmanager
    def _among_leaders(self) -> Iterator[None]:
        with _named(f"between hosts, where members are the leaders {self._split.leaders}", self.close, range(self.world_size)):
            yield


@contextmanager
def _named(where: str, give_up: Callable[[], None], members: Sequence[int]) -> Iterator[None]:
    """Say in errors which part failed, and which ``members`` of the whole those of the part are.

    The other parts are closed, so that nobody on another level waits for this member.
    """
    try:
        yield
    except PeerError as exc:
        give_up()
        error = type(exc)(f"{where}: {exc}")
        error.members = tuple(members[member] for member in exc.members)
        raise error from exc
    except BaseException:
        give_up()
        raise
