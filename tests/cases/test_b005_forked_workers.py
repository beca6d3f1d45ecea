"""B005: ranks never start from a forked copy of a live runtime."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ContextStateError
from parallel_runtime.launch import launch
from tests.spmd import scripts

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


def start_method(ctx: ParallelContext) -> tuple[str, float]:
    return multiprocessing.get_start_method(), ctx.tp.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("method", [None, "spawn"])
def test_b005_a_used_parent_launches_without_forking_itself(method: str | None) -> None:
    as_it_was, num_threads = multiprocessing.get_start_method(allow_none=True), torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(200, 200) @ torch.ones(200, 200)
    multiprocessing.set_start_method(method, force=True)
    try:
        assert launch(start_method, ParallelConfig(tp=2), timeout_s=30) == [("forkserver", 2.0)] * 2
        assert multiprocessing.get_start_method(allow_none=True) == method
    finally:
        multiprocessing.set_start_method(as_it_was, force=True)
        torch.set_num_threads(num_threads)


def fork_inside(ctx: ParallelContext) -> tuple[str, str, bool, float]:
    group = ctx.tp
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        for use in (lambda: ctx.tp, lambda: group.all_reduce(torch.ones(1))):
            try:
                use()
                said.append("it worked")
            except ContextStateError as error:
                said.append(str(error))
        ctx.close()  # of the copy alone: neither the other ranks nor the parent's sockets learn of it
        os.write(write_fd, "\n".join(said).encode())
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        first, second = pipe.read().split("\n")
    os.waitpid(pid, 0)
    assert ctx._meeting is not None
    has_left = ctx._meeting.room.check([f"left/{ctx.rank}"])
    return first, second, has_left, ctx.tp.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("shm", ["auto", "off"])
def test_b005_a_context_used_in_a_forked_child_is_refused_at_once(shm: str) -> None:
    config = ParallelConfig.model_validate({"tp": 2, "shm": shm})
    for by_context, by_group, has_left, total in launch(fork_inside, config, timeout_s=30):
        assert "context belongs to another process" in by_context
        assert "belongs to another process" in by_group
        assert not has_left
        assert total == 2.0


@pytest.mark.parametrize("hint", ["", "own_name = __name__\n"], ids=["seen before", "seen by the ranks"])
def test_b005_a_script_without_a_main_guard_gets_one_clear_error(tmp_path: Path, hint: str) -> None:
    script = scripts.write_script(
        tmp_path, f"{hint}def who(ctx):\n    return ctx.rank\nprint('top level', flush=True)\nlaunch(who, ParallelConfig(tp=2))\n"
    )
    status, out, err = scripts.run(script)
    assert status == 1
    assert err.count("Traceback") == 1
    assert 'if __name__ == "__main__":' in err
    assert "script.py" in err.splitlines()[-4]
    assert out.count("top level") <= 3
