"""The same script under torchrun, whose agent serves the store."""

from pathlib import Path

import pytest

from tests.spmd import scripts

TWO_AGENTS = """
with ParallelContext(ParallelConfig(tp=2, pp=-1)) as ctx:
    totals = [group.all_reduce(torch.tensor(10.0 ** ctx.rank)).item() for group in (ctx.tp, ctx.pp)]
    with ParallelContext(ParallelConfig(dp=4)) as other:
        count = other.dp.all_reduce(torch.ones(1)).item()
    who, seen = ctx.identity, (*totals, count, torch.distributed.is_initialized())
    line = f"{ctx.rank} {ctx.coordinate} {who.source} {who.local_rank} {who.host_rank} {who.num_hosts} {seen}"
    os.write(1, f"{line}{chr(10)}".encode())
"""


@pytest.mark.processes
@pytest.mark.timeout(170)
def test_two_agents_stand_for_two_nodes(tmp_path: Path) -> None:
    script = scripts.write_script(tmp_path, TWO_AGENTS)
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{scripts.free_port()}", "--local-addr", "127.0.0.1"]
    arguments = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *meeting, str(script)]
    agents = [scripts.start(arguments, scripts.clean_environ(GLOO_SOCKET_IFNAME="lo")) for _ in range(2)]
    ended = [scripts.finish(agent, timeout_s=150) for agent in agents]
    assert [status for status, _, _ in ended] == [0, 0], ended
    lines = sorted(line for _, out, _ in ended for line in out.splitlines())
    assert lines == [
        f"{rank} tp={rank % 2} cp=0 dp=0 pp={rank // 2} ep=0 etp={rank % 2} edp=0 dcp=0 torchrun {rank % 2} {rank // 2} 2 "
        f"{([11.0, 1100.0][rank // 2], [101.0, 1010.0][rank % 2], 4.0, False)}"
        for rank in range(4)
    ]
    assert not any("destroy_process_group" in err for _, _, err in ended)


RESTARTED = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with ParallelContext(ParallelConfig(tp=2)) as ctx:
    total = ctx.tp.all_reduce(torch.tensor(10.0 ** ctx.rank)).item()
    if attempt == 0 and ctx.rank == 1:
        os._exit(7)
    ctx.tp.barrier()
    os.write(1, f"{ctx.rank} attempt {attempt} {total:g}{chr(10)}".encode())
"""


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_an_elastic_restart_opens_a_fresh_context(tmp_path: Path) -> None:
    """The agent's store outlives the attempt; nothing of the first one is met again."""
    script = scripts.write_script(tmp_path, RESTARTED)
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(script)]
    status, out, err = scripts.finish(scripts.start(arguments), timeout_s=90)
    assert status == 0, err
    assert sorted(out.splitlines()) == ["0 attempt 1 11", "1 attempt 1 11"]
