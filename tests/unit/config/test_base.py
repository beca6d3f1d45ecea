"""FrozenModel: strict, frozen, validated on every way in, and refusing in words."""

import copy
import pickle
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, ClassVar, cast

import pytest

from parallel_runtime.config.base import FrozenModel
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.errors import ConfigError


class Inner(FrozenModel):
    depth: int = 1


class Outer(FrozenModel):
    size: int
    name: str = "x"
    inner: Inner = Inner()
    spellings: ClassVar[MappingProxyType[str, str]] = MappingProxyType({"width": "size"})


class Named(FrozenModel):
    name: str = "x"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Outer.model_validate({}), r"^Outer needs size=\.\.\.$"),
        (lambda: cast(Any, Outer)(2, "y"), r"Outer takes no values without names; .* by name: Outer\(size=2, name='y'\)$"),
        (
            lambda: Outer.model_validate({"size": True}),
            "size=True is a bool, not an integer, and nothing is converted; .* size=2",
        ),
        (lambda: Outer.model_validate({"size": "2"}), "size='2' is a str, not an integer"),
        (lambda: Outer.model_validate({"size": 2, "width": 3}), "width=3: Outer has no setting 'width'; did you mean 'size'"),
        (lambda: Outer.model_validate({"size": 2, "sise": 3}), "sise=3: Outer has no setting 'sise'; did you mean 'size'"),
        (lambda: Outer.model_validate({"size": 2, "zzz": 3}), "zzz=3: Outer has no setting 'zzz'; it has size, name, inner"),
        (lambda: Outer.model_validate({"size": 2, "name": 3}), "name=3 should be a valid string"),
        (lambda: Outer.model_validate({"size": 2.5, "name": 3}), "size=2.5 is a float, not an integer.*; name=3 should be"),
        (lambda: Outer.model_validate({"size": 2, "inner": {"depth": "1"}}), "depth='1' is a str"),
        (lambda: Outer.model_validate(3), "Outer: 3 should be a valid dictionary or instance of Outer"),
        (lambda: Outer.model_validate_json("{"), "Outer: Invalid JSON"),
        (lambda: Outer.model_validate_json('{"size": "2"}'), "size='2' is a str"),
        (lambda: Outer.model_validate_strings({"size": "x"}), "size='x' is a str, not an integer"),
        (lambda: Outer.model_construct(size="2"), "size='2' is a str"),  # type: ignore[arg-type]  # what is tested
        (lambda: Outer(size=2).replace(size="2"), "size='2' is a str"),
        (lambda: Outer(size=2).model_copy(update={"size": "2"}), "size='2' is a str"),
    ],
)
def test_every_way_in_refuses_in_words(make: Callable[[], Outer], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


@pytest.mark.parametrize(
    "clone", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy, lambda it: it.model_copy()]
)
def test_copies_are_validated_again(clone: Callable[[Outer], Outer]) -> None:
    good = Outer(size=2, inner=Inner(depth=3))
    assert clone(good) == good
    good.__dict__["size"] = "tampered"
    with pytest.raises(ConfigError, match="size='tampered' is a str"):
        clone(good)


def test_instances_are_frozen_and_hashable() -> None:
    one = Outer(size=2)
    with pytest.raises(ConfigError, match=r"^Outer cannot be changed; make a variant with replace\(size=3\)$"):
        one.size = 3  # type: ignore[misc]  # the point of the test
    with pytest.raises(ConfigError, match=r"with replace\(size=\.\.\.\)$"):
        del one.size
    assert one == Outer(size=2)
    assert hash(one) == hash(Outer(size=2))
    assert one.replace(name="y") == Outer(size=2, name="y")


def test_other_ways_in_validate_too() -> None:
    assert Outer.model_construct(size=2) == Outer(size=2)
    assert Named.model_validate_strings({"name": "y"}) == Named(name="y")


def test_a_state_cannot_be_set() -> None:
    one = Outer(size=2)
    with pytest.raises(ConfigError, match="Outer cannot be changed; make a variant with replace"):
        one.__setstate__({"__dict__": {"size": 99}})
    assert one.size == 2


def test_a_final_model_has_no_subclasses() -> None:
    with pytest.raises(ConfigError, match="Wider cannot be a subclass: ParallelConfig is final"):
        type("Wider", (ParallelConfig,), {})


def test_values_that_cannot_be_shown_or_are_long_do_not_hide_the_refusal() -> None:
    with pytest.raises(ConfigError, match=r"size='x{99}\.\.\. is a str"):
        Outer.model_validate({"size": "x" * 100_000})
    with pytest.raises(ConfigError, match="name=<int> should be a valid string"):
        Outer.model_validate({"size": 2, "name": 10**5000})


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Outer(size=1), "Outer(size=1)"),
        (Outer(size=1, name="x", inner=Inner(depth=1)), "Outer(size=1)"),
        (Outer(size=1, name="y", inner=Inner(depth=2)), "Outer(size=1, name='y', inner=Inner(depth=2))"),
        (ParallelConfig(), "ParallelConfig()"),
        (ParallelConfig(dp=1, tp=2), "ParallelConfig(tp=2)"),
        (ParallelConfig(tp=2, etp=2), "ParallelConfig(tp=2, etp=2)"),
        (ParallelConfig(tp=2, dp=2, etp=1, ranks=(0, 2, 4, 6)), "ParallelConfig(tp=2, dp=2, etp=1, ranks=(0, 2, 4, 6))"),
    ],
)
def test_the_text_is_short_and_makes_an_equal_instance(made: FrozenModel, text: str) -> None:
    assert repr(made) == str(made) == text
    assert eval(text) == made
