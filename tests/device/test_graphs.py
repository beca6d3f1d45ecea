"""What ``benchmarks.gpu_check`` looks at, as tests. Needs a GPU; has not run yet."""

import pytest
import torch

from benchmarks.gpu_check import CHECKS, Check, main

pytestmark = [pytest.mark.timeout(115), pytest.mark.processes]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_on_a_gpu(check: Check) -> None:
    if torch.cuda.device_count() < check.num_gpus:
        pytest.skip(f"needs {check.num_gpus} GPUs")
    assert check.run()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_check_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    first, *told = capsys.readouterr().out.splitlines()
    assert first.endswith("GPUs: 0 (none)")
    assert len(told) == len(CHECKS)
    assert all("skipped, needs" in line for line in told)
