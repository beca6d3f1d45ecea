"""The ranks of an engine as Ray actors, and the links to their leaders, which may be on other nodes.

A leader dials the front over TCP and both prove that they know a key, which reaches the leader through Ray. What follows are the
same messages as over the pipe to a local process; none of them is unpickled.
"""

import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Final, final

import torch

from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import PeerTimeoutError
from parallel_runtime.launch import RayRanks
from parallel_runtime.launch.ray_ranks import connected_to_ray
from parallel_runtime.serving.executors import RankExecutor, serve_rank
from parallel_runtime.serving.serving_config import ServingConfig

__all__ = ["FrontAddress", "FrontDesk", "serve_rank_on_ray", "start_ray_world"]

_KEY_BYTES: Final = 32
_LOOK_S: Final = 0.5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FrontAddress:
    """Where a leader dials.

    Attributes:
        host: Address of the front process.
        port: TCP port.
        key: What both ends prove to know.
    """

    host: str
    port: int
    key: bytes


@final
class FrontDesk:
    """Listens for one leader.

    Args:
        host: Address to listen on, and only there.

    Attributes:
        address: For the leader.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.settimeout(_LOOK_S)
        self.address = FrontAddress(host=host, port=self._socket.getsockname()[1], key=secrets.token_bytes(_KEY_BYTES))

    def close(self) -> None:
        """Listen no longer."""
        self._socket.close()

    def accept(self, ranks: RankExecutor, timeout_s: float) -> Connection:
        """Wait for the leader, and look after the ranks meanwhile. Who does not know the key is sent away.

        Args:
            ranks: Asked for failures while waiting.
            timeout_s: Longest wait in seconds.

        Returns:
            The link; the caller closes it.

        Raises:
            PeerTimeoutError: No leader dialled in time.
            RankFailedError: A rank failed.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ranks.check()
            try:
                caller, _ = self._socket.accept()
            except TimeoutError:
                continue
            caller.settimeout(None)
            link = Connection(caller.detach())
            try:
                deliver_challenge(link, self.address.key)
                answer_challenge(link, self.address.key)
            except (AuthenticationError, EOFError, OSError):
                link.close()
                continue
            return link
        raise PeerTimeoutError(f"no leader dialled {self.address.host}:{self.address.port} within {timeout_s:g} s")


def serve_rank_on_ray(
    ctx: ParallelContext, model: str, config: ServingConfig, fronts: Sequence[FrontAddress], num_threads: int | None
) -> None:
    """``serve_rank`` in an actor, whose leader dials the front.

    Args:
        ctx: Open context of this rank.
        model: Name or path of the model, which every node must have.
        config: How to serve it.
        fronts: Where the leaders dial, one per data-parallel rank.
        num_threads: Intra-op threads of this rank; ``None`` leaves Ray's.

    Raises:
        ParallelRuntimeError: As for ``serve_rank``.

    Collective: all ranks of the replica.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    leads = ctx.coordinate.tp == ctx.coordinate.cp == ctx.coordinate.pp == 0
    links: list[Connection] = []
    if leads:
        front = fronts[ctx.coordinate.dp]
        links = [Client((front.host, front.port), authkey=front.key)] * len(fronts)
    serve_rank(ctx, model, config, links)


def start_ray_world(
    parallel: ParallelConfig, model: str, config: ServingConfig, stack: ExitStack, *, num_threads: int | None = None
) -> tuple[RankExecutor, list[Connection]]:
    """Start the ranks of one world on a Ray cluster, in a placement group of their own.

    Args:
        parallel: Of the context that each rank enters.
        model: Name or path of the model, which every node must have.
        config: How to serve it.
        stack: Ends the ranks, and closes the links.
        num_threads: As for ``serve_rank_on_ray``.

    Returns:
        The ranks, and the front's ends of the links to their leaders, one per data-parallel rank.

    Raises:
        LaunchError: Ray is not installed or cannot place the ranks, or one of them failed.
        PeerTimeoutError: A leader did not dial within ``deadlines.join_s``.
    """
    host = stack.enter_context(connected_to_ray())
    with ExitStack() as listening:
        desks = [FrontDesk(host) for _ in range(parallel.dp)]
        for desk in desks:
            listening.callback(desk.close)
        addresses = [desk.address for desk in desks]
        args = (model, config, addresses, num_threads)
        ranks: RankExecutor = stack.enter_context(RayRanks(serve_rank_on_ray, parallel, args=args))
        fronts = []
        for desk in desks:
            fronts.append(desk.accept(ranks, parallel.deadlines.join_s))
            stack.callback(fronts[-1].close)
    return ranks, fronts
