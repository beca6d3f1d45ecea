"""Hypothesis strategies for layouts, configs and model shapes."""

from typing import cast

from parallel_runtime.config import ModelShape, ParallelConfig
from parallel_runtime.terms import DENSE_AXES, DenseAxis
from parallel_runtime.topology import Layout
from parallel_runtime.topology.sizes import divisors

try:
    from hypothesis import strategies as st
except ImportError as exc:
    raise ImportError("parallel_runtime.testing.strategies needs hypothesis: pip install hypothesis") from exc

__all__ = ["configs", "layouts", "model_shapes"]


@st.composite
def configs(draw: st.DrawFn, *, max_axis: int = 4, max_world_size: int = 64) -> ParallelConfig:
    """Draw a valid, resolved config: any sizes, order, expert split, dcp, and any set of ranks.

    Args:
        draw: Given by hypothesis.
        max_axis: Largest size of a dense axis.
        max_world_size: Largest world.

    Returns:
        The config.
    """
    sizes: dict[str, int] = {}
    room = max_world_size
    for axis in draw(st.permutations(DENSE_AXES)):
        sizes[axis] = draw(st.integers(1, max(1, min(max_axis, room))))
        room //= sizes[axis]
    tp, cp, stage = sizes["tp"], sizes["cp"], sizes["tp"] * sizes["cp"] * sizes["dp"]
    ep = draw(st.sampled_from(divisors(stage)))
    config = ParallelConfig(
        tp=tp,
        cp=cp,
        dp=sizes["dp"],
        pp=sizes["pp"],
        ep=ep,
        etp=draw(st.none() | st.sampled_from(divisors(stage // ep))),
        dcp=draw(st.sampled_from((1, *(cp * width for width in divisors(tp))))),
        order=cast(tuple[DenseAxis, ...], tuple(draw(st.permutations(DENSE_AXES)))),
    )
    match draw(st.sampled_from(("plain", "offset", "scattered"))):
        case "offset":
            return config.replace(rank_offset=draw(st.integers(0, 100)))
        case "scattered":
            size = config.world_size
            ranks = draw(st.lists(st.integers(0, 4 * max_world_size), min_size=size, max_size=size, unique=True))
            return config.replace(ranks=tuple(ranks))
        case _:
            return config


def layouts(*, max_axis: int = 4, max_world_size: int = 64) -> st.SearchStrategy[Layout]:
    """Draw a layout.

    Args:
        max_axis: Largest size of a dense axis.
        max_world_size: Largest world.

    Returns:
        The layouts of ``configs``.
    """
    return configs(max_axis=max_axis, max_world_size=max_world_size).map(lambda config: config.layout)


@st.composite
def model_shapes(draw: st.DrawFn, *, max_heads: int = 32) -> ModelShape:
    """Draw the numbers of a model.

    Args:
        draw: Given by hypothesis.
        max_heads: Most query heads.

    Returns:
        A shape whose KV heads divide its query heads.
    """
    num_query_heads = draw(st.integers(1, max_heads))
    return ModelShape(
        num_layers=draw(st.integers(1, 64)),
        num_query_heads=num_query_heads,
        num_kv_heads=draw(st.sampled_from(divisors(num_query_heads))),
        vocab_size=draw(st.integers(1, 1000)),
        hidden_size=num_query_heads * draw(st.sampled_from((8, 16, 64))),
        intermediate_size=draw(st.integers(1, 1000)),
        num_experts=draw(st.sampled_from((0, 0, 4, 6, 8))),
    )
