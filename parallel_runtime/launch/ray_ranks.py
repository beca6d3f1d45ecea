"""Ranks as actors of a Ray cluster: placed by its scheduler, watched from here.

One placement bundle holds one tensor-parallel group, and a bundle never spans nodes; bundles of one node get consecutive groups.
So the groups that talk most stay inside a host, and ranks that follow each other are near each other. Ray moves arguments and
results; the ranks themselves talk through the groups of their context, as under any other launcher.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import ModuleType, TracebackType
from typing import Any, Final, Generic, Self, TypeVar, final

from parallel_runtime.comm.c10d import HostedStore, listen_store
from parallel_runtime.config.environment import Identity, adopt_environ, current_environ, variables_of
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.context.parallel_context import ParallelContext
from parallel_runtime.errors import ConfigError, ContextStateError, LaunchError
from parallel_runtime.launch.outcome import RankFailure, failure_of, find_root, rank_failed_error
from parallel_runtime.launch.payload import name_of
from parallel_runtime.launch.processes import check_startable, check_timeout
from parallel_runtime.terms import Rank
from parallel_runtime.values import error_text, shown

__all__ = ["Place", "RayRanks", "connected_to_ray", "launch_on_ray", "seat_ranks"]

_T = TypeVar("_T")

_BLAME_GRACE_S: Final = 2.0
"""How long a failure that blames a peer waits for that peer's own word."""
_LOOPBACK: Final = "127.0.0.1"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where Ray put an actor.

    Attributes:
        node: Ray's id of the node.
        address: From which other nodes reach it.
        gpu_ids: GPUs of the node that Ray set apart for the actor.
    """

    node: str
    address: str
    gpu_ids: tuple[int, ...] = ()


@final
class RayRanks(Generic[_T]):
    """Every rank of a world as a Ray actor, for as long as a ``with`` block lasts.

    Uses the cluster this process is connected to; where it is connected to none, connects as ``ray.init()`` would and disconnects
    at the end. Leaving the block, in whatever way, ends every rank and gives its resources back.

    Args:
        fn: Runs as ``fn(ctx, *args)`` on every rank. Ray pickles it by value.
        config: Of the context that each rank enters; ranks are numbered from 0.
        args: Further arguments; each rank gets a copy.
        cpus_per_rank: CPUs that Ray sets apart for each rank.
        gpus_per_rank: GPUs likewise; by default one where ``config.device`` is ``"cuda"``, else none.

    Raises:
        ArgumentError: ``fn`` cannot be called, or ``config`` is no config.
        ConfigError: The config is for threads or does not number its ranks from 0, or a number of CPUs or GPUs is impossible.
        LaunchError: Ray is not installed, or cannot place the ranks within ``deadlines.join_s``.
    """

    def __init__(
        self,
        fn: Callable[..., _T],
        config: ParallelConfig,
        *,
        args: Sequence[object] = (),
        cpus_per_rank: float = 1.0,
        gpus_per_rank: float | None = None,
    ) -> None:
        check_startable(fn, config, backends=("auto", "gloo", "nccl"))
        gpus = (1.0 if config.device == "cuda" else 0.0) if gpus_per_rank is None else gpus_per_rank
        for name, value in (("cpus_per_rank", cpus_per_rank), ("gpus_per_rank", gpus)):
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
                raise ConfigError(f"{name}={shown(value)} must be a number, 0 or more")
        self._ray = _import_ray()
        self._fn = fn
        self._config = config
        self._args = args
        self._share = {name: value for name, value in (("CPU", float(cpus_per_rank)), ("GPU", float(gpus))) if value}
        self._actors: list[Any] = []
        self._runs: dict[Any, int] = {}
        self._outcomes: dict[int, Any] = {}
        self._failures: list[RankFailure] = []
        self._failed_at = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Place the ranks and start them.

        Raises:
            ContextStateError: It was entered before.
            LaunchError: The cluster cannot place them in time, or an actor died while it started.
        """
        if self._actors:
            raise ContextStateError("RayRanks is entered once; make a new one to start ranks again")
        with ExitStack() as stack:
            stack.enter_context(connected_to_ray())
            self._place(stack)
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def check(self) -> bool:
        """Look at the ranks without waiting.

        Returns:
            Whether every rank has returned.

        Raises:
            RankFailedError: A rank failed.
        """
        self._take_in(0.0)
        return len(self._outcomes) == self._config.world_size

    def wait(self, timeout_s: float | None = None) -> list[_T]:
        """Wait until every rank has returned.

        Args:
            timeout_s: Longest wait in seconds; ``None`` waits as long as they run.

        Returns:
            Each rank's result, in rank order.

        Raises:
            LaunchError: They did not return in time.
            RankFailedError: A rank failed; the first cause comes first, what followed is marked as such.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(self._outcomes) < self._config.world_size:
            if deadline is not None and time.monotonic() >= deadline:
                late = ", ".join(str(rank) for rank in sorted(self._runs.values()))
                raise LaunchError(f"{name_of(self._fn)} was not finished within {timeout_s:g} s on ranks {late}")
            self._take_in(self._pause(deadline))
        return [self._outcomes[rank] for rank in range(self._config.world_size)]

    def _place(self, stack: ExitStack) -> None:
        from ray.util import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        tp_groups = self._config.layout.groups("tp")
        bundles = [{name: value * len(ranks) for name, value in self._share.items()} or {"CPU": 0.001} for ranks in tp_groups]
        group = placement_group(bundles, strategy="PACK")
        stack.callback(remove_placement_group, group)
        join_s = self._config.deadlines.join_s
        if not group.wait(join_s):
            raise LaunchError(
                f"Ray did not place {len(bundles)} bundles of {bundles[0]} (one for each tp group, never split over nodes) "
                f"within {join_s:g} s (deadlines.join_s); the cluster has {self._ray.cluster_resources()}, "
                f"of which {self._ray.available_resources()} are free"
            )
        remote = self._ray.remote(_RankActor)
        for index, ranks in enumerate(tp_groups):
            for _ in ranks:
                strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
                actor = remote.options(
                    num_cpus=self._share.get("CPU", 0.0), num_gpus=self._share.get("GPU", 0.0), scheduling_strategy=strategy
                ).remote()
                stack.callback(self._ray.kill, actor)
                self._actors.append(actor)

    def _start(self) -> None:
        join_s = self._config.deadlines.join_s
        places: list[Place] = self._ask([actor.place.remote() for actor in self._actors], join_s)
        seats = seat_ranks(places, [list(group) for group in self._config.layout.groups("tp")])
        first = self._actors[next(index for index, seat in seats.items() if seat.rank == 0)]
        host = seats[0].master_host or _LOOPBACK
        (port,) = self._ask([first.serve_store.remote(host)], join_s)
        call = self._ray.put((self._fn, tuple(self._args)))
        gpus = _gpus_by_node(places, seats)
        for index, seat in seats.items():
            identity = replace(seat, master_port=port)
            run = self._actors[index].run.remote(self._config, identity, gpus[places[index].node], call)
            self._runs[run] = seat.rank

    def _ask(self, questions: list[Any], timeout_s: float) -> list[Any]:
        try:
            return list(self._ray.get(questions, timeout=timeout_s))
        except self._ray.exceptions.RayError as error:
            raise LaunchError(f"an actor for a rank did not come up: {error_text(error)}") from error

    def _take_in(self, timeout_s: float) -> None:
        done, _ = self._ray.wait(list(self._runs), num_returns=1, timeout=timeout_s) if self._runs else ([], [])
        for run in done:
            rank = self._runs.pop(run)
            try:
                outcome = self._ray.get(run)
            except self._ray.exceptions.RayError as error:
                outcome = RankFailure(rank=rank, text=f"its actor ended: {error_text(error)}")
            if isinstance(outcome, RankFailure):
                self._failed_at = self._failed_at or time.monotonic()
                self._failures.append(outcome)
            else:
                (self._outcomes[rank],) = outcome
        has_settled = not self._runs or time.monotonic() - self._failed_at >= _BLAME_GRACE_S
        if self._failures and (find_root(self._failures) or has_settled):
            raise rank_failed_error(self._failures, world_size=self._config.world_size, what=name_of(self._fn))

    def _pause(self, deadline: float | None) -> float:
        ends = [time.monotonic() + 1.0]
        if deadline is not None:
            ends.append(deadline)
        if self._failures:
            ends.append(self._failed_at + _BLAME_GRACE_S)
        return max(0.0, min(ends) - time.monotonic())


@contextmanager
def connected_to_ray() -> Iterator[str]:
    """This process's connection to a Ray cluster: the one it has, or one for as long as the block lasts.

    Yields:
        The address of this node inside the cluster.

    Raises:
        LaunchError: Ray is not installed.
    """
    ray = _import_ray()
    with ExitStack() as stack:
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False)
            stack.callback(ray.shutdown)
        yield str(ray.util.get_node_ip_address())


def launch_on_ray(
    fn: Callable[..., _T],
    config: ParallelConfig,
    *args: object,
    cpus_per_rank: float = 1.0,
    gpus_per_rank: float | None = None,
    timeout_s: float | None = None,
) -> list[_T]:
    """Run ``fn(ctx, *args)`` on every rank of a world of Ray actors.

    Args:
        fn: Any function; Ray pickles it by value.
        config: Of the context that each rank enters; decides the number of ranks.
        *args: Further arguments; each rank gets a copy.
        cpus_per_rank: CPUs that Ray sets apart for each rank.
        gpus_per_rank: GPUs likewise; by default one where ``config.device`` is ``"cuda"``, else none.
        timeout_s: Longest run in seconds; ``None`` sets no limit.

    Returns:
        What each rank returned, in rank order.

    Raises:
        ArgumentError: As for ``RayRanks``, or ``timeout_s`` is not a number of seconds.
        ConfigError: As for ``RayRanks``.
        LaunchError: Ray is not installed or cannot place the ranks, or they did not finish in time.
        RankFailedError: A rank failed or its actor died; carries that rank's own traceback.
    """
    check_timeout(timeout_s)
    with RayRanks(fn, config, args=args, cpus_per_rank=cpus_per_rank, gpus_per_rank=gpus_per_rank) as ranks:
        return ranks.wait(timeout_s)


def seat_ranks(places: Sequence[Place], groups: Sequence[Sequence[int]]) -> dict[int, Identity]:
    """Decide which actor becomes which rank.

    Args:
        places: Of each actor; actors of one group follow each other and share a node.
        groups: World ranks of each tensor-parallel group, as many in all as there are actors.

    Returns:
        The identity for each actor's index, the actor of rank 0 first. Groups whose actors share a node are numbered together,
        nodes in the order in which they first occur. ``master_port`` is not known yet.
    """
    nodes = list(dict.fromkeys(place.node for place in places))
    bundles = [list(range(start, start + len(groups[0]))) for start in range(0, len(places), len(groups[0]))]
    near = sorted(bundles, key=lambda bundle: nodes.index(places[bundle[0]].node))
    actor_of = {
        rank: actor for ranks, bundle in zip(groups, near, strict=True) for rank, actor in zip(ranks, bundle, strict=True)
    }
    master = _LOOPBACK if len(nodes) == 1 else places[actor_of[0]].address
    on_node = {node: [rank for rank in sorted(actor_of) if places[actor_of[rank]].node == node] for node in nodes}
    return {
        actor: Identity(
            rank=Rank(rank),
            world_size=len(places),
            local_rank=on_node[places[actor].node].index(rank),
            local_world_size=len(on_node[places[actor].node]),
            host_rank=nodes.index(places[actor].node),
            num_hosts=len(nodes),
            master_host=master,
        )
        for rank, actor in sorted(actor_of.items())
    }


def _gpus_by_node(places: Sequence[Place], seats: Mapping[int, Identity]) -> dict[str, tuple[int, ...]]:
    """All GPUs of the world on each node, in the order of local ranks, so that local rank n finds its own as number n."""
    found: dict[str, tuple[int, ...]] = {}
    for index in sorted(seats, key=lambda index: seats[index].local_rank):
        found[places[index].node] = found.get(places[index].node, ()) + places[index].gpu_ids
    return found


@final
class _RankActor:
    """The process of one rank, as Ray starts it."""

    def __init__(self) -> None:
        self._store: HostedStore | None = None

    def place(self) -> Place:
        ray = _import_ray()
        context = ray.get_runtime_context()
        gpus = tuple(int(gpu) for gpu in ray.get_gpu_ids())
        return Place(node=context.get_node_id(), address=ray.util.get_node_ip_address(), gpu_ids=gpus)

    def serve_store(self, host: str) -> int:
        self._store = listen_store(host)
        return self._store.port

    def run(
        self, config: ParallelConfig, identity: Identity, gpus: tuple[int, ...], call: tuple[Callable[..., Any], Any]
    ) -> tuple[Any] | RankFailure:
        fn, args = call
        try:
            shown_gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
            adopt_environ({**current_environ(), **variables_of(identity), **shown_gpus})
            with ParallelContext(config, identity=identity) as ctx:
                return (fn(ctx, *args),)
        except Exception as error:
            return failure_of(identity.rank, error, skip_frames=1)


def _import_ray() -> ModuleType:
    try:
        import ray
    except ImportError as error:
        raise LaunchError("Ray is not installed; pip install 'parallel-runtime[ray]'") from error
    return ray
