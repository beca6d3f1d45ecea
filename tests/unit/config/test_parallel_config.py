"""ParallelConfig: defaults, refusals, -1, worlds that do not start at 0, and what must agree."""

import json
import pickle
from collections.abc import Callable

import pytest

from parallel_runtime.config.deadlines import Deadlines
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.errors import ConfigError


def test_defaults_are_one_rank() -> None:
    config = ParallelConfig()
    assert (config.world_size, config.stage_size, config.edp, config.etp) == (1, 1, 1, 1)
    assert config.is_resolved
    assert config.deadlines == Deadlines()


def test_sizes_multiply() -> None:
    config = ParallelConfig(tp=4, dp=2, pp=3, ep=2)
    assert (config.world_size, config.stage_size, config.etp, config.edp) == (24, 8, 4, 1)
    assert config.layout.etp == 4


def test_a_world_size_needs_no_name_and_sizes_do() -> None:
    assert ParallelConfig(tp=2, dp=-1).resolve(8) == ParallelConfig(tp=2, dp=4)
    build: Callable[..., object] = ParallelConfig
    with pytest.raises(ConfigError, match=r"give them by name: ParallelConfig\(tp=2, pp=2\)$"):
        build(2, 2)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tp": 0}, "tp=0: a size is an integer of 1 or more"),
        ({"tp": -2}, "tp=-2: a size is an integer of 1 or more"),
        ({"ep": -1}, "ep=-1: a size is an integer of 1 or more"),
        ({"etp": 0}, "etp=0: a size is an integer of 1 or more"),
        ({"tp": True}, "tp=True is a bool, not an integer"),
        ({"tp": "2"}, "tp='2' is a str, not an integer"),
        ({"tp": 2.0}, "tp=2.0 is a float, not an integer"),
        ({"tp": None}, "tp=None is a NoneType, not an integer"),
        ({"tensor_parallel": 2}, "no setting 'tensor_parallel'; did you mean 'tp'"),
        ({"pipeline_model_parallel_size": 2}, "did you mean 'pp'"),
        ({"expert_tensor_parallel_size": 2}, "did you mean 'etp'"),
        ({"dedlines": {}}, "did you mean 'deadlines'"),
        ({"tp": -1, "dp": -1}, "tp=-1 and dp=-1: only one size can be inferred"),
        ({"tp": 8, "ep": 3}, r"ep=3 does not divide stage_size = tp\*cp\*dp = 8\*1\*1 = 8; nearest ep that do: 2, 4"),
        ({"tp": 8, "ep": 2, "etp": 3}, "etp=3 does not divide stage_size/ep = 8/2 = 4"),
        ({"tp": 4, "dcp": 3}, "dcp=3 does not divide tp=4"),
        ({"order": ("tp", "cp", "pp")}, "must name each of tp, cp, dp, pp once"),
        ({"order": "tp-pp"}, "order='tp-pp' should be a valid tuple"),
        ({"backend": "mpi"}, "backend='mpi' should be 'auto', 'gloo', 'nccl', 'local' or 'fake'"),
        ({"checked": "on"}, "checked='on' should be 'auto', True or False"),
        ({"deadlines": {"join_s": -1.0}}, "join_s=-1.0 must be a number of seconds above 0"),
        ({"rank_offset": -1}, "rank_offset=-1 is negative"),
        ({"tp": 2, "ranks": (2, 3), "rank_offset": 2}, "rank_offset=2 and explicit ranks exclude each other"),
        ({"tp": 2, "ranks": (1, 2, 3)}, r"3 ranks are named but tp\*cp\*dp\*pp = 2"),
        ({"tp": 2, "ranks": (1, 1)}, "rank 1 is named twice"),
    ],
)
def test_refusals(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ParallelConfig.model_validate(settings)
    with pytest.raises(ConfigError, match=text):
        ParallelConfig(**settings)  # type: ignore[arg-type]  # the point of the test


def test_a_size_of_minus_one_is_inferred() -> None:
    config = ParallelConfig(tp=2, dp=-1, ep=4)
    assert not config.is_resolved
    assert config.etp is None
    resolved = config.resolve(world_size=8)
    assert resolved == ParallelConfig(tp=2, dp=4, ep=4)
    assert resolved.etp == 2
    assert resolved.resolve(world_size=8) is resolved


@pytest.mark.parametrize(
    ("settings", "world_size", "text"),
    [
        ({"tp": 3, "pp": 2}, 8, r"world_size=8 but tp\*cp\*dp\*pp = 3\*1\*1\*2 = 6; launch 6 ranks, or change one size: tp=4"),
        ({"tp": 3, "pp": -1}, 8, "pp=-1 cannot be inferred: .* = 3 does not divide world_size=8; nearest worlds that work: 6, 9"),
        ({"tp": -1, "ep": 3}, 8, "ep=3 does not divide stage_size = .* = 8; nearest ep that do: 2, 4"),
    ],
)
def test_a_world_that_does_not_fit(settings: dict[str, object], world_size: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ParallelConfig.model_validate(settings).resolve(world_size=world_size)


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda config: config.layout, "layout"),
        (lambda config: config.world_size, "world size"),
        (lambda config: config.stage_size, "stage size"),
        (lambda config: config.edp, "edp size"),
        (lambda config: config.digest(), "digest"),
        (lambda config: config.agreed_settings(), "set of settings to agree on"),
    ],
)
def test_an_open_size_leaves_questions_unanswered(ask: Callable[[ParallelConfig], object], what: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"dp=-1 is not known yet, so there is no {what}; call resolve\(world_size=...\) first"
    ):
        ask(ParallelConfig(dp=-1))


def test_open_configs_travel_too() -> None:
    config = ParallelConfig(dp=-1, tp=2)
    assert pickle.loads(pickle.dumps(config)) == config
    assert ParallelConfig.model_validate_json(config.model_dump_json()) == config


def test_worlds_need_not_start_at_zero() -> None:
    assert ParallelConfig(tp=2, pp=2, rank_offset=8).layout.groups("pp") == ((8, 10), (9, 11))
    assert ParallelConfig(tp=2, pp=2, ranks=(3, 1, 0, 7)).layout.groups("pp") == ((3, 0), (1, 7))
    as_list: object = [4, 6]
    assert ParallelConfig.model_validate({"tp": 2, "ranks": as_list}).ranks == (4, 6)
    assert ParallelConfig.model_validate({"tp": 2, "ranks": range(4, 6)}).ranks == (4, 5)


def test_a_derived_etp_is_derived_again() -> None:
    config = ParallelConfig(tp=4, ep=2, dp=2)
    assert config.etp == 4
    assert config.replace(tp=2).etp == 2
    assert config.replace(tp=2, etp=1).etp == 1
    assert ParallelConfig(tp=4, etp=None).replace(tp=2).etp == 2


def test_the_digest_tells_worlds_apart_and_nothing_else() -> None:
    config = ParallelConfig(tp=2, dp=2, ep=2)
    same = (
        ParallelConfig(tp=2, dp=2, ep=2, etp=2),
        ParallelConfig(tp=2, dp=2, ep=2, deadlines=Deadlines(join_s=1)),
        ParallelConfig(tp=2, dp=2, ep=2, ranks=(0, 1, 2, 3)),
    )
    other = (
        ParallelConfig(tp=2, dp=2),
        ParallelConfig(tp=2, dp=2, ep=2, etp=1),
        ParallelConfig(tp=2, dp=2, ep=2, rank_offset=4),
        ParallelConfig(tp=2, dp=2, ep=2, ranks=(0, 2, 1, 3)),
        ParallelConfig(tp=2, dp=2, ep=2, backend="gloo"),
        ParallelConfig(tp=2, dp=2, ep=2, checked=True),
        ParallelConfig(tp=2, dp=2, ep=2, order=("dp", "cp", "tp", "pp")),
    )
    assert {each.digest() for each in same} == {config.digest()}
    assert len({config.digest(), *(each.digest() for each in other)}) == 1 + len(other)
    assert json.loads(json.dumps(config.agreed_settings())) == config.agreed_settings()


def test_the_digest_does_not_change_between_processes() -> None:
    assert ParallelConfig(tp=2, pp=2).digest() == "70a4d7c592857831dfee986f88cffc8088215974502e95ece7fb1086e7c56e22"
