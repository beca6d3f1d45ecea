"""Who holds which token and which expert, and so who reduces what over which group: decided here and nowhere else.

The tokens of a rank are held, all of them and equal, by every member of its ``tp`` group. An expert is held by the ranks of one
``ep`` index, each with the columns of its ``etp`` index. From the three groups follows everything a mixture has to know:

1. *Share.* Members that can reach the same experts divide their equal tokens, so that every token is computed once.
2. *Gather.* Where the members of ``etp`` hold different tokens, they put them together first and take their sums out last.
3. *Exchange.* Where the members of ``ep`` hold different tokens, rows travel to the experts and back.
4. *Sum.* One all-reduce over ``tp`` joins the shares, the columns, the experts and the shared expert. There is no other sum.
"""

from dataclasses import dataclass, field
from typing import final

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.topology.shards import split_even

__all__ = ["ExpertGroups"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """The three groups a mixture of experts communicates over. All are borrowed.

    Every answer follows from sizes and ranks such that it is equal on all ranks of a stage, whatever the sizes and the order of
    the axes.

    Attributes:
        tp: Attention's tensor-parallel group: its members hold the same tokens. Ranks with other tokens are never in it.
        ep: Its members hold different experts.
        etp: Its members hold different columns of the same experts.
        must_gather: Whether members of ``etp`` hold different tokens.
        must_exchange: Whether members of ``ep`` have to be sent the tokens of others.
    """

    tp: GroupCoordinator
    ep: GroupCoordinator
    etp: GroupCoordinator
    must_gather: bool = field(init=False)
    must_exchange: bool = field(init=False)

    def __post_init__(self) -> None:
        width, block = self.etp.world_size, self.etp.world_size * self.ep.world_size
        is_spread = self.ep.world_size > 1 and not self._is_within_tp(block, self.etp, self.ep)
        object.__setattr__(self, "must_gather", not self._is_within_tp(width, self.etp))
        object.__setattr__(self, "must_exchange", is_spread)

    def share(self, num_tokens: int) -> range:
        """The rows of its tokens that this rank answers for; the members that compute them together have the same ones.

        Args:
            num_tokens: T, the tokens of this ``tp`` group.
        """
        together = 1 if self.must_gather else self.etp.world_size
        together *= 1 if self.must_exchange else self.ep.world_size
        shares = split_even(num_tokens, parts=self.tp.world_size // together)
        return shares[self.tp.rank_in_group // together]

    def _is_within_tp(self, width: int, *groups: GroupCoordinator) -> bool:
        """Whether the blocks of ``width`` ranks along these groups tile the tp groups, here and so everywhere.

        The ranks of such a block follow each other in the stage. Where one lies inside a tp group, tp is the fastest axis, and
        where ``width`` divides the size of tp as well, no block crosses the border of a tp group.
        """
        return self.tp.world_size % width == 0 and all(set(group.ranks) <= set(self.tp.ranks) for group in groups)
