"""Collectives of one group: arguments checked and put in the form a communicator accepts, results put back.

Everything is decided from facts that are equal on every member, so that all members raise or none. The public text of each
method is on ``GroupCoordinator``.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from parallel_runtime.comm.communicator import Operation, ReduceOp
from parallel_runtime.comm.core import GroupCore
from parallel_runtime.comm.pieces import (
    Joined,
    as_rows,
    check_shares,
    check_splits,
    deliver,
    do_nothing,
    exchanged,
    loosely_agreed,
    merged_rows,
    new_copy,
    put_back,
    real_dim,
    resized_shape,
    room_for,
    scaled_shape,
    shards,
    split_rows,
)
from parallel_runtime.comm.tensors import (
    Reduction,
    check_out,
    check_strided,
    check_writable,
    dense,
    fold,
    is_plain,
    movable,
    normal_dim,
    overlap,
    reduction,
)
from parallel_runtime.errors import ArgumentError, DimError, DtypeError

__all__ = ["Collectives"]


@final
class Collectives:
    """The collectives of ``core``.

    Raises:
        ArgumentError: Sizes, splits, ops, peers or an output that do not fit; the text of each method is on the coordinator.
        DimError: There is no such dim.
        DtypeError: The dtype has no such arithmetic.
    """

    __slots__ = ("_core", "_reductions")

    def __init__(self, core: GroupCore) -> None:
        self._core = core
        self._reductions: dict[tuple[torch.dtype, str], Reduction] = {}

    @property
    def world_size(self) -> int:
        """Members of the group."""
        return self._core.communicator.world_size

    @property
    def rank_in_group(self) -> int:
        """Position of this member."""
        return self._core.communicator.rank_in_group

    @property
    def name(self) -> str:
        """Of the group."""
        return self._core.name

    @property
    def device(self) -> torch.device:
        """Where the group's tensors live."""
        return self._core.spec.device

    def all_reduce_(self, tensor: Tensor, op: ReduceOp | str, timeout_s: float | None) -> Tensor:
        """Combine in place."""
        core = self._core
        plan = self._reduction(tensor, op, "all_reduce_")
        limit_s = core.collective_s if timeout_s is None else core.deadline(timeout_s, 0.0)
        if plan.view is None and self._is_simple(tensor):
            core.run("all_reduce_", tensor, core.communicator.all_reduce_, tensor, plan.op, limit_s)
            return tensor
        work = self._dense(tensor)
        if work.data_ptr() != tensor.data_ptr() or work.stride() != tensor.stride():
            check_writable(tensor, "all_reduce_")
        self._reduce_all(tensor, work, plan, "all_reduce_", limit_s)
        return put_back(tensor, work)

    def all_reduce(self, tensor: Tensor, op: ReduceOp | str, out: Tensor | None, timeout_s: float | None) -> Tensor:
        """Combine into a new tensor, or ``out``."""
        core = self._core
        plan = self._reduction(tensor, op, "all_reduce")
        limit_s = core.deadline(timeout_s, core.collective_s)
        if out is None and plan.view is None and self._is_simple(tensor):
            work = tensor.clone()
            core.run("all_reduce", tensor, core.communicator.all_reduce_, work, plan.op, limit_s)
            return work
        payload = self._dense(tensor)
        work = (
            new_copy(tensor, payload) if out is None else room_for(out, tuple(tensor.shape), tensor, "all_reduce").copy_(payload)
        )
        self._reduce_all(tensor, work, plan, "all_reduce", limit_s)
        return deliver(out, work)

    def all_gather(self, tensor: Tensor, dim: int, out: Tensor | None, timeout_s: float | None) -> Tensor:
        """Join equal shards along ``dim``."""
        core = self._core
        limit_s = core.deadline(timeout_s, core.collective_s)
        world_size = core.communicator.world_size
        if dim == 0 and out is None and self._is_simple(tensor) and tensor.dim() and movable(tensor) is tensor:
            rows = tensor.new_empty((world_size, *tensor.shape))
            core.run("all_gather", tensor, core.communicator.all_gather, rows, tensor, limit_s)
            return rows.flatten(0, 1)
        payload = self._dense(tensor)
        dim = normal_dim(dim, payload.dim(), "all_gather")
        shape = scaled_shape(payload, dim, world_size)
        stacked = (world_size, *payload.shape)
        if out is not None:
            check_out(out, shape, tensor, "all_gather")
        direct = room_for(out, shape, payload, "all_gather") if dim == 0 else None
        target = payload.new_empty(stacked) if direct is None else direct.view(stacked)
        moved = movable(payload)
        self._agreed("all_gather", tensor, ("dim", dim), core.communicator.all_gather, as_rows(target, moved), moved, limit_s)
        return deliver(out, direct if direct is not None else merged_rows(target, dim, shape))

    def all_gatherv(
        self, tensor: Tensor, sizes: Sequence[int] | None, dim: int, out: Tensor | None, timeout_s: float | None
    ) -> Tensor:
        """Join shards whose sizes along ``dim`` differ."""
        core = self._core
        limit_s = core.deadline(timeout_s, core.collective_s)
        payload = self._dense(tensor)
        dim = real_dim(dim, payload, "all_gatherv")
        if sizes is None:
            sizes = [row[0] for row in exchanged(core, "all_gatherv", [payload.shape[dim]], "", limit_s)]
        check_splits(sizes, core.communicator.world_size, "all_gatherv", "sizes")
        if sizes[core.communicator.rank_in_group] != payload.shape[dim]:
            raise ArgumentError(
                f"all_gatherv: sizes={list(sizes)} says {sizes[core.communicator.rank_in_group]} for member "
                f"{core.communicator.rank_in_group}, its tensor has {payload.shape[dim]} along dim {dim}"
            )
        joined = Joined(payload, sizes, dim, out, "all_gatherv")
        args = ([movable(piece) for piece in joined.pieces], movable(payload), limit_s)
        core.run_agreed("all_gatherv", tensor, loosely_agreed(payload, dim, tuple(sizes)), core.communicator.all_gatherv, *args)
        return joined.result()

    def reduce_scatter(self, tensor: Tensor, dim: int, op: ReduceOp | str, out: Tensor | None, timeout_s: float | None) -> Tensor:
        """Combine and keep this member's share along ``dim``."""
        core = self._core
        plan = self._reduction(tensor, op, "reduce_scatter")
        limit_s = core.deadline(timeout_s, core.collective_s)
        payload = self._dense(tensor)
        dim = real_dim(dim, payload, "reduce_scatter")
        check_shares(core, payload, dim, "reduce_scatter", "use reduce_scatterv with sizes")
        rows = split_rows(payload, dim, core.communicator.world_size)
        output = room_for(out, tuple(rows.shape[1:]), payload, "reduce_scatter")
        args = (plan.apply(output), plan.apply(rows), plan.op, limit_s)
        self._agreed("reduce_scatter", tensor, (str(plan.op), "dim", dim), core.communicator.reduce_scatter, *args)
        return deliver(out, output)

    def reduce_scatterv(
        self, tensor: Tensor, sizes: Sequence[int], dim: int, op: ReduceOp | str, out: Tensor | None, timeout_s: float | None
    ) -> Tensor:
        """Combine and keep a share whose size along ``dim`` differs between members."""
        core = self._core
        plan = self._reduction(tensor, op, "reduce_scatterv")
        limit_s = core.deadline(timeout_s, core.collective_s)
        payload = self._dense(tensor)
        dim = real_dim(dim, payload, "reduce_scatterv")
        world_size = core.communicator.world_size
        check_splits(sizes, world_size, "reduce_scatterv", "sizes", total=payload.shape[dim])
        pieces = [plan.apply(piece.contiguous()) for piece in torch.split(payload, list(sizes), dim)]
        mine = pieces[core.communicator.rank_in_group]
        received = mine.new_empty((world_size, *mine.shape))
        shape = resized_shape(payload, dim, sizes[core.communicator.rank_in_group])
        output = room_for(out, shape, payload, "reduce_scatterv")
        args = ([movable(row) for row in received], [movable(piece) for piece in pieces], limit_s)
        agreed = (str(plan.op), "dim", dim, "sizes", tuple(sizes), tensor.dtype, tuple(tensor.shape))
        core.run_agreed("reduce_scatterv", tensor, agreed, core.communicator.all_to_allv, *args)
        plan.apply(output).copy_(fold(received, plan.op))
        return deliver(out, output)

    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int, out: Tensor | None, timeout_s: float | None) -> Tensor:
        """Exchange equal parts."""
        core = self._core
        limit_s = core.deadline(timeout_s, core.collective_s)
        payload = self._dense(tensor)
        split_dim = real_dim(split_dim, payload, "all_to_all")
        concat_dim = real_dim(concat_dim, payload, "all_to_all")
        check_shares(core, payload, split_dim, "all_to_all", "use all_to_allv with splits")
        world_size = core.communicator.world_size
        part = payload.shape[split_dim] // world_size
        pieces = [piece.contiguous() for piece in torch.split(payload, [part] * world_size, split_dim)]
        joined = Joined(pieces[0], [pieces[0].shape[concat_dim]] * world_size, concat_dim, out, "all_to_all")
        args = ([movable(piece) for piece in joined.pieces], [movable(piece) for piece in pieces], limit_s)
        self._agreed("all_to_all", tensor, ("dims", split_dim, concat_dim), core.communicator.all_to_allv, *args)
        return joined.result()

    def all_to_allv(
        self,
        tensor: Tensor,
        splits: Sequence[int],
        output_splits: Sequence[int] | None,
        dim: int,
        out: Tensor | None,
        timeout_s: float | None,
    ) -> Tensor:
        """Exchange parts of any size along ``dim``."""
        core = self._core
        limit_s = core.deadline(timeout_s, core.collective_s)
        payload = self._dense(tensor)
        dim = real_dim(dim, payload, "all_to_allv")
        world_size = core.communicator.world_size
        try:
            check_splits(splits, world_size, "all_to_allv", "splits", total=payload.shape[dim])
            fault = ""
        except ArgumentError as exc:
            if output_splits is not None:
                raise
            fault = str(exc)
        if output_splits is None:
            sent = [0] * world_size if fault else list(splits)
            output_splits = [row[core.communicator.rank_in_group] for row in exchanged(core, "all_to_allv", sent, fault, limit_s)]
        check_splits(output_splits, world_size, "all_to_allv", "output_splits")
        pieces = [movable(piece.contiguous()) for piece in torch.split(payload, list(splits), dim)]
        joined = Joined(payload, output_splits, dim, out, "all_to_allv")
        args = ([movable(piece) for piece in joined.pieces], pieces, limit_s)
        core.run_agreed("all_to_allv", tensor, loosely_agreed(payload, dim, ()), core.communicator.all_to_allv, *args)
        return joined.result()

    def broadcast_(self, tensor: Tensor, src: int, timeout_s: float | None) -> Tensor:
        """Overwrite with that of ``src``."""
        core = self._core
        limit_s = core.deadline(timeout_s, core.collective_s)
        core.member(src, "src")
        if self._is_simple(tensor) and movable(tensor) is tensor:
            core.run("broadcast_", tensor, core.communicator.broadcast_, tensor, src, limit_s)
            return tensor
        work = self._dense(tensor)
        check_writable(tensor, "broadcast_")
        self._agreed("broadcast_", tensor, ("from member", src), core.communicator.broadcast_, movable(work), src, limit_s)
        return tensor if src == core.communicator.rank_in_group else put_back(tensor, work)

    def broadcast(self, tensor: Tensor, src: int, timeout_s: float | None) -> Tensor:
        """A new tensor equal to that of ``src``."""
        core = self._core
        limit_s = core.deadline(timeout_s, core.collective_s)
        core.member(src, "src")
        payload = self._dense(tensor)
        work = new_copy(tensor, payload) if src == core.communicator.rank_in_group else torch.empty_like(payload)
        self._agreed("broadcast", tensor, ("from member", src), core.communicator.broadcast_, movable(work), src, limit_s)
        return work

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp | str, out: Tensor | None, timeout_s: float | None) -> Tensor | None:
        """Combine on ``dst``."""
        core = self._core
        plan = self._reduction(tensor, op, "reduce")
        limit_s = core.deadline(timeout_s, core.collective_s)
        at_dst = core.member(dst, "dst") == core.communicator.rank_in_group
        payload = self._dense(tensor)
        output = room_for(out, tuple(payload.shape), payload, "reduce") if at_dst else None
        args = (None if output is None else plan.apply(output), plan.apply(payload), dst, plan.op, limit_s)
        self._agreed("reduce", tensor, ("to member", dst, str(plan.op)), core.communicator.reduce, *args)
        return None if output is None else deliver(out, output)

    def gather(self, tensor: Tensor, dst: int, dim: int, out: Tensor | None, timeout_s: float | None) -> Tensor | None:
        """Join equal shards on ``dst``."""
        core = self._core
        limit_s = core.deadline(timeout_s, core.collective_s)
        at_dst = core.member(dst, "dst") == core.communicator.rank_in_group
        payload = self._dense(tensor)
        dim = normal_dim(dim, payload.dim(), "gather")
        world_size = core.communicator.world_size
        shape = scaled_shape(payload, dim, world_size)
        if at_dst and out is not None:
            check_out(out, shape, tensor, "gather")
        target = payload.new_empty((world_size, *payload.shape)) if at_dst else None
        moved = movable(payload)
        outputs = None if target is None else list(as_rows(target, moved))
        self._agreed("gather", tensor, ("to member", dst, "dim", dim), core.communicator.gather, outputs, moved, dst, limit_s)
        return None if target is None else deliver(out, merged_rows(target, dim, shape))

    def scatter(
        self,
        tensor: Tensor | None,
        src: int,
        dim: int,
        out: Tensor | None,
        timeout_s: float | None,
        share: Callable[[object, int, float, str], object],
    ) -> Tensor:
        """Deal out equal shards of the tensor on ``src``; what they look like is broadcast first."""
        core = self._core
        limit_s = core.deadline(timeout_s, core.collective_s)
        at_src = core.member(src, "src") == core.communicator.rank_in_group
        rows: Tensor | None = None
        fault: Exception | None = None
        about: object = None
        if at_src:
            try:
                rows = shards(core, tensor, dim)
                about = (rows.dtype, tuple(rows.shape[1:]))
            except (ArgumentError, DimError) as exc:
                fault, about = exc, str(exc)
        about = share(about, src, limit_s, "scatter shape")
        if fault is not None:
            raise fault
        if not isinstance(about, tuple):
            raise ArgumentError(f"scatter from member {src} of {core.name}: {about}")
        dtype, shape = about
        like = torch.empty(0, dtype=dtype, device=core.spec.device) if rows is None else rows
        output = room_for(out, shape, like, "scatter")
        inputs = None if rows is None else [movable(row) for row in rows]
        if output.numel():
            args = (movable(output), inputs, src, limit_s)
            core.run_agreed("scatter", output, ("from member", src), core.communicator.scatter, *args)
        return deliver(out, output)

    def scatter_parts(self, output: Tensor, parts: Sequence[Tensor] | None, src: int, timeout_s: float | None) -> Tensor:
        """Deal out the parts on ``src``, which are all like ``output`` on every member."""
        core = self._core
        limit_s = core.deadline(timeout_s, core.collective_s)
        at_src = core.member(src, "src") == core.communicator.rank_in_group
        check_writable(core.on_device(output), "scatter")
        if at_src and (parts is None or {(part.dtype, part.shape) for part in parts} != {(output.dtype, output.shape)}):
            raise ArgumentError("scatter: the source hands over one part per member, each of the shape and dtype of the output")
        inputs = [movable(self._dense(part)) for part in parts] if at_src and parts is not None else None
        is_free = is_plain(output) and not any(overlap(output, part) for part in inputs or ())
        target = output if is_free else torch.empty(output.shape, dtype=output.dtype, device=output.device)
        self._agreed("scatter", output, ("from member", src), core.communicator.scatter, movable(target), inputs, src, limit_s)
        return deliver(output, target)

    def barrier(self, timeout_s: float | None) -> None:
        """Wait for every member."""
        core = self._core
        core.run_agreed("barrier", None, (), core.control.barrier, core.deadline(timeout_s, core.spec.timeouts.control_s))

    def _is_simple(self, tensor: Tensor) -> bool:
        """Whether a communicator takes ``tensor`` as it is, and nothing has to be compared first."""
        core = self._core
        try:
            return (
                type(tensor) is Tensor
                and tensor.is_cpu is core.is_cpu
                and is_plain(tensor)
                and tensor.numel() > 0
                and not core.checked
                and not tensor.is_nested
            )
        except (AttributeError, RuntimeError):  # no tensor at all, or a sparse one; the usual way says so
            return False

    def _dense(self, tensor: Tensor) -> Tensor:
        """``tensor`` as a communicator takes it."""
        return dense(self._core.on_device(tensor))

    def _reduction(self, tensor: Tensor, op: ReduceOp | str, operation: str) -> Reduction:
        try:
            plan = self._reductions.get((tensor.dtype, op))
        except (AttributeError, TypeError):  # no tensor, or an op that cannot be looked up; the plan says so
            plan = None
        return plan or self._plan(tensor, op, operation)

    def _plan(self, tensor: Tensor, op: ReduceOp | str, operation: str) -> Reduction:
        check_strided(self._core.on_device(tensor))
        plan = reduction(tensor.dtype, op, operation)
        if plan.view is None and not self._core.communicator.supports(Operation.ALL_REDUCE, tensor.dtype, tensor.nbytes):
            raise DtypeError(f"{operation}: {self._core.communicator.kind} has no arithmetic on {tensor.dtype}; convert it first")
        self._reductions[tensor.dtype, str(op)] = plan
        return plan

    def _reduce_all(self, tensor: Tensor, work: Tensor, plan: Reduction, operation: str, limit_s: float) -> None:
        self._agreed(operation, tensor, (str(plan.op),), self._core.communicator.all_reduce_, plan.apply(work), plan.op, limit_s)

    def _agreed(
        self, operation: str, tensor: Tensor, agreed: tuple[object, ...], call: Callable[..., None], *args: object
    ) -> None:
        """Run an operation whose tensor has one shape and dtype on all members; an empty one moves nothing."""
        run = call if tensor.numel() else do_nothing
        self._core.run_agreed(operation, tensor, (*agreed, tensor.dtype, tuple(tensor.shape)), run, *args)
