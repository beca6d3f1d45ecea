"""The package's front door: every name it promises is there, and none of the globals it replaces."""

import parallel_runtime


def test_every_promised_name_is_there() -> None:
    for name in parallel_runtime.__all__:
        assert getattr(parallel_runtime, name).__module__.startswith("parallel_runtime"), name
    assert not hasattr(parallel_runtime, "get_tp_group")
