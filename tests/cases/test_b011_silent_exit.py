"""B011: programs end without noise, whoever leaves first."""

from pathlib import Path

import pytest

from tests.spmd import scripts

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

BODY = """
def main():
    with ParallelContext(ParallelConfig(tp=2)) as ctx:
        assert ctx.tp.all_reduce(torch.ones(1)).item() == 2.0
        if sys.argv[1] == "exit":
            sys.exit(0)
        if ctx.rank == 1:
            time.sleep(3.0)
    print("left", flush=True)

main()
"""


@pytest.mark.parametrize("how", ["normal", "exit"])
def test_b011_two_ranks_end_in_silence(tmp_path: Path, how: str) -> None:
    """Rank 0 serves the store, and leaves three seconds before rank 1 (or both call ``sys.exit(0)`` inside the block)."""
    script = scripts.write_script(tmp_path, BODY)
    master = {"PARALLEL_RUNTIME_MASTER_ADDR": "127.0.0.1", "PARALLEL_RUNTIME_MASTER_PORT": str(scripts.free_port())}
    world = {"PARALLEL_RUNTIME_WORLD_SIZE": "2", "PARALLEL_RUNTIME_LOCAL_WORLD_SIZE": "2"}
    processes = [
        scripts.start(
            [str(script), how],
            scripts.clean_environ(PARALLEL_RUNTIME_RANK=str(rank), PARALLEL_RUNTIME_LOCAL_RANK=str(rank), **world, **master),
        )
        for rank in range(2)
    ]
    for process in processes:
        status, out, err = scripts.finish(process)
        assert (status, err) == (0, "")
        assert out == ("left\n" if how == "normal" else "")
