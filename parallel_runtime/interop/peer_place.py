"""Who a rank is in one group, in the words of SGLang's and vLLM's ``GroupCoordinator``."""

import torch
from torch import distributed

from parallel_runtime.comm import GroupCoordinator

__all__ = ["PeerPlace"]


class PeerPlace:
    """What a ``PeerGroup`` says without moving anything.

    Args:
        group: Of an open context. Borrowed.

    Attributes:
        group: The wrapped group, with everything of ours.
    """

    def __init__(self, group: GroupCoordinator) -> None:
        self.group = group

    @property
    def unique_name(self) -> str:
        """Such as ``"tp#0"``; unlike the peers' names it is unique inside one context only."""
        return self.group.name

    @property
    def rank(self) -> int:
        """World rank."""
        return self.group.rank

    @property
    def ranks(self) -> list[int]:
        """World ranks of the members, in group order."""
        return list(self.group.ranks)

    @property
    def world_size(self) -> int:
        """Number of members."""
        return self.group.world_size

    @property
    def rank_in_group(self) -> int:
        """Position in the group."""
        return self.group.rank_in_group

    @property
    def local_rank(self) -> int:
        """Position on this host."""
        return self.group.local_rank

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        return self.group.device

    @property
    def first_rank(self) -> int:
        """World rank of the first member."""
        return self.group.first_rank

    @property
    def last_rank(self) -> int:
        """World rank of the last member."""
        return self.group.last_rank

    @property
    def next_rank(self) -> int:
        """World rank of the next member, around the ring."""
        return self.group.next_rank

    @property
    def prev_rank(self) -> int:
        """World rank of the previous member, around the ring."""
        return self.group.prev_rank

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the first member."""
        return self.group.is_first_rank

    @property
    def is_last_rank(self) -> bool:
        """Whether this rank is the last member."""
        return self.group.is_last_rank

    @property
    def device_group(self) -> distributed.ProcessGroup:
        """For ``torch.distributed.*(group=...)``; takes tensors of the CPU as well, so it is ``cpu_group`` too."""
        return self.group.process_group

    @property
    def cpu_group(self) -> distributed.ProcessGroup:
        """The same group as ``device_group``."""
        return self.group.process_group
