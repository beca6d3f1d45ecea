"""The same script under torchrun, whose agent serves the store."""

from pathlib import Path

import pytest

from tests.spmd import scripts

BODY = """
import logging
def main():
    with ParallelContext(ParallelConfig(tp=2, pp=-1)) as ctx:
        total = ctx.tp.all_reduce(torch.tensor(10.0 ** ctx.rank)).item()
        with ParallelContext(ParallelConfig(dp=4)) as other:
            count = other.dp.all_reduce(torch.ones(1)).item()
        line = f"{ctx.rank} {ctx.coordinate} {ctx.identity.source} {total:g} {count:g} {torch.distributed.is_initialized()}"
        sys.stdout.write(line + chr(10))
        sys.stdout.flush()

main()
"""


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_four_ranks_under_torchrun(tmp_path: Path) -> None:
    script = scripts.write_script(tmp_path, BODY)
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    status, out, err = scripts.finish(scripts.start(arguments), timeout_s=90)
    assert status == 0, err
    assert sorted(out.splitlines()) == [
        f"{rank} tp={rank % 2} cp=0 dp=0 pp={rank // 2} ep=0 etp={rank % 2} edp=0 dcp=0 torchrun {[11, 1100][rank // 2]} 4 False"
        for rank in range(4)
    ]
    assert "destroy_process_group" not in err
