"""A context's axes as torch's ``DeviceMesh``, without a default process group."""

from collections.abc import Callable
from itertools import product
from typing import Any, Final, final

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError

__all__ = ["ContextMesh", "device_mesh"]

_DeviceMesh: Any = DeviceMesh  # torch's stubs know neither its private arguments nor that it can be subclassed
_DENSE: Final = frozenset(("tp", "cp", "dp", "pp"))
_EXPERT: Final = frozenset(("etp", "ep", "edp", "pp"))


def device_mesh(ctx: ParallelContext, *axes: str) -> DeviceMesh:
    """The ranks around this one as a mesh of torch, for DTensor, ``fully_shard`` and ``parallelize_module``.

    Its groups are the context's own, so they use its communicators, deadlines and errors, and torch forgets their names when the
    context closes. Slicing, ``_flatten``, ``get_rank`` and ``get_local_rank`` work, all without a default process group. Two
    contexts never have equal meshes. Parameters of a plain module are cut from each rank's own copy: say
    ``src_data_rank=None`` to ``parallelize_module`` and ``distribute_tensor``, which would ask a default group otherwise.

    Making the first mesh teaches ``DeviceMesh`` that what is sliced or joined from meshes of a context is such a mesh, too. That
    stays for the life of the process and changes nothing about other meshes.

    Args:
        ctx: Open.
        axes: Dense axes, or expert axes and ``pp``, slowest first as torch has it; by default the dense ones, such as
            ``("pp", "dp", "cp", "tp")``.

    Returns:
        A mesh with the axes as names of its dims. It lasts as long as the context.

    Raises:
        ArgumentError: An axis is unknown or named twice, or axes of both views are mixed.
        ContextStateError: The context is not open.

    Collective: none; each rank makes its own.
    """
    names = axes or tuple(reversed(ctx.layout.order))
    if len(set(names)) != len(names) or not (set(names) <= _DENSE or set(names) <= _EXPERT):
        raise ArgumentError(
            f"no mesh over {', '.join(map(str, names))}: name each axis once, of tp, cp, dp, pp (the dense view) "
            f"or of etp, ep, edp, pp (the expert view)"
        )
    view = _DENSE if set(names) <= _DENSE else _EXPERT
    here = {axis: getattr(ctx.coordinate, axis) for axis in view}
    sizes = [getattr(ctx.layout, axis) for axis in names]
    ranks = [
        ctx.layout.rank(**(here | dict(zip(names, index, strict=True)))) for index in product(*(range(size) for size in sizes))
    ]
    _let_submeshes_be_ours()
    mesh = ContextMesh(
        ctx.device.type,
        torch.tensor(ranks, dtype=torch.int).view(sizes),
        mesh_dim_names=names,
        _init_backend=False,
        _rank=ctx.rank,
    )
    mesh._belong(f"{ctx.uid}@{ctx.rank}", [ctx.group(axis) for axis in names], ctx.open_group)
    return mesh


@final
class ContextMesh(_DeviceMesh):  # type: ignore[misc]  # see above
    """A ``DeviceMesh`` that knows its rank itself. Made by ``device_mesh``, and by torch when it slices or joins such meshes."""

    def __init__(self, *args: Any, _root_mesh: Any = None, _rank: int | None = None, **options: Any) -> None:
        self._rank = _root_mesh._rank if _rank is None else _rank
        super().__init__(*args, _root_mesh=_root_mesh, _rank=self._rank, **options)
        if _root_mesh is not None:
            self._thread_id = _root_mesh._thread_id

    def _belong(self, owner: str, groups: list[GroupCoordinator], open_group: Callable[..., GroupCoordinator]) -> None:
        """Take the groups of a context. ``_thread_id`` is what torch compares besides the ranks: here, whose mesh it is."""
        self._thread_id = owner
        self._open_group = open_group
        self._dim_group_names = [self._add(group) for group in groups]

    def _add(self, group: GroupCoordinator) -> str:
        process_group = group.process_group
        self._pg_registry[process_group.group_name] = process_group
        return process_group.group_name

    def __deepcopy__(self, memo: object) -> "ContextMesh":
        """Itself: a copy would stand for the same groups, and be unequal to it."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What is left of it in a file, such as one that holds a ``DTensor``."""
        return {name: value for name, value in super().__getstate__().items() if name != "_open_group"}

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks, in the shape of the mesh; of a slice, those around this rank."""
        ranks: torch.Tensor = self._get_mesh_tensor_from_full_mesh(self._layout.remap_to_tensor(self._rank_map), self._rank)
        return ranks

    def get_rank(self) -> int:
        """World rank of this process."""
        rank: int = self._rank
        return rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Index of this process on a dim.

        Args:
            mesh_dim: Name or number of the dim; may be left out where there is one only.
        """
        index: int = self.get_group(mesh_dim).rank()
        return index

    def _create_flatten_mesh(self, mesh_dim_name: str, backend_override: object = None) -> None:
        """Several dims as one: a group of its own, so all ranks do it, in the same order where they do it more than once."""
        del backend_override  # the context decides
        root = self._get_root_mesh()
        if mesh_dim_name in root._mesh_dim_names:
            raise ArgumentError(f"{mesh_dim_name!r} is a dim of {root} already; choose another name")
        if mesh_dim_name in root._flatten_mapping:
            return
        flat = ContextMesh(
            self._device_type,
            _layout=type(self._layout)([self._layout.collapse()]),
            _rank_map=root._rank_map,
            mesh_dim_names=(mesh_dim_name,),
            _root_mesh=root,
            _init_backend=False,
        )
        flat._dim_group_names = [root._add(root._open_group(*self._mesh_dim_names))]
        root._flatten_mapping[mesh_dim_name] = flat


def _let_submeshes_be_ours() -> None:
    """``DeviceMesh`` makes slices of a mesh by its own name, and asks the default group for their rank."""

    def make(cls: type, *args: object, _root_mesh: object = None, **options: object) -> object:
        return object.__new__(ContextMesh if isinstance(_root_mesh, ContextMesh) else cls)

    if "__new__" not in vars(_DeviceMesh):
        _DeviceMesh.__new__ = make
