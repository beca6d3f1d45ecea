"""``multiprocessing``'s fork server: one idle process that has imported what ranks need, and becomes each of them by a fork."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Final

from parallel_runtime.launch.guards import refuse_launched_rank, refuse_removed_directory, refuse_unguarded_main

__all__ = ["RANK_MODULES", "begin_fork_server", "preloading"]

RANK_MODULES: Final = ("torch", "parallel_runtime.launch.rank_process")
"""What every rank needs."""


def begin_fork_server(*modules: str) -> None:
    """Let the fork server import what ranks need while the caller does something else; one that runs stays as it is.

    Args:
        modules: Names of modules, imported in this order.

    Raises:
        LaunchError: This process may start no ranks.
    """
    refuse_unguarded_main()
    refuse_launched_rank()
    refuse_removed_directory()
    with preloading(*modules):
        forkserver.ensure_running()


@contextmanager
def preloading(*modules: str) -> Iterator[None]:
    """Inside, a fork server that is not yet running begins by importing; ``multiprocessing``'s settings are as before afterwards.

    Args:
        modules: Names of modules, imported in this order.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    before: list[str] = vars(forkserver._forkserver)["_preload_modules"]  # nothing public reads what set_forkserver_preload set
    own = [name for name in before if name != "__main__"]
    forkserver.set_forkserver_preload([*own, *modules])
    try:
        yield
    finally:
        forkserver.set_forkserver_preload(before)
        multiprocessing.set_start_method(method, force=True)
