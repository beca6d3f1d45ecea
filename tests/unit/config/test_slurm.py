"""Slurm's short forms."""

import pytest

from parallel_runtime.config.slurm import expand_counts, first_host, read_slurm


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu03", "gpu03"),
        ("gpu[03-05,09],login1", "gpu03"),
        ("a,b[1-2]", "a"),
        ("rack[1-2]n[04,06]", "rack1n04"),
        ("n[1,3]-ib", "n1-ib"),
        ("", None),
    ],
)
def test_first_host(nodelist: str, host: str | None) -> None:
    assert first_host(nodelist) == host


def test_expand_counts() -> None:
    assert expand_counts("4(x2),3") == (4, 4, 3)


def test_a_step_id_of_many_digits_is_a_shell_and_no_rank() -> None:
    assert read_slurm({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "9" * 5000}).claim is None
