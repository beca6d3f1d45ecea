"""B027, step 1: a config that was pickled, deep-copied or written as JSON is equal, frozen and valid, or it is refused."""

import copy
import json
import pickle

import pytest

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.errors import ConfigError

CONFIG = ParallelConfig(tp=2, pp=2, dp=2, ep=2, deadlines=Deadlines(join_s=5), checked=True, ranks=(9, 8, 7, 6, 5, 4, 3, 2))


@pytest.mark.parametrize(
    "clone",
    [
        pickle.loads(pickle.dumps(CONFIG)),
        copy.deepcopy(CONFIG),
        ParallelConfig.model_validate_json(CONFIG.model_dump_json()),
        ParallelConfig.model_validate(json.loads(json.dumps(CONFIG.model_dump()))),
    ],
    ids=["pickle", "deepcopy", "json", "dict"],
)
def test_b027_a_copy_is_equal_and_still_frozen(clone: ParallelConfig) -> None:
    assert clone == CONFIG
    assert clone.digest() == CONFIG.digest()
    with pytest.raises(ConfigError, match=r"cannot be changed; make a variant with replace\(tp=4\)"):
        clone.tp = 4  # type: ignore[misc]  # the point of the test


def test_b027_an_invalid_config_cannot_arrive() -> None:
    tampered = copy.copy(CONFIG)
    tampered.__dict__["tp"] = 0
    travelling = pickle.dumps(tampered)
    with pytest.raises(ConfigError, match="tp=0"):
        pickle.loads(travelling)
    with pytest.raises(ConfigError, match="tp=0"):
        copy.deepcopy(tampered)
    with pytest.raises(ConfigError, match="ep=5"):
        ParallelConfig.model_validate_json(CONFIG.model_dump_json().replace('"ep":2', '"ep":5'))
