"""Does this model fit this layout? Asked before any process starts."""

from collections.abc import Callable

from parallel_runtime.config.model_shape import ModelShape
from parallel_runtime.errors import ConfigError
from parallel_runtime.topology import (
    Layout,
    Uneven,
    split_experts,
    split_heads,
    split_intermediate,
    split_layers,
    split_vocabulary,
)
from parallel_runtime.topology.sizes import divisors, join_sizes

__all__ = ["check_kept_heads", "check_model_fits"]


def check_model_fits(shape: ModelShape, layout: Layout, *, uneven: Uneven = "allow") -> None:
    """Refuse a model that cannot be cut by a layout.

    Args:
        shape: Numbers of the model.
        layout: The layout.
        uneven: ``"refuse"`` demands that heads, vocabulary and intermediate size are cut into equal parts.

    Raises:
        ConfigError: Something does not fit; the text holds everything that does not, with the sizes that would.
    """
    tp, heads = layout.tp, (shape.num_query_heads, shape.num_kv_heads)
    axis, parts = ("etp", layout.etp) if shape.num_experts else ("tp", tp)
    splits: list[Callable[[], object]] = [
        lambda: split_layers(shape.num_layers, num_stages=layout.pp),
        lambda: split_heads(*heads, parts=tp, uneven=uneven),
        lambda: split_vocabulary(shape.vocab_size, parts=tp, uneven=uneven),
        lambda: split_intermediate(shape.intermediate_size, parts=parts, uneven=uneven, axis=axis),
        lambda: check_kept_heads(shape, layout),
    ]
    if shape.num_experts:
        splits.append(lambda: split_experts(shape.num_experts, ep=layout.ep))
    faults = []
    for split in splits:
        try:
            split()
        except ConfigError as exc:
            faults.append(str(exc))
    if faults:
        raise ConfigError("the model does not fit the layout: " + "; ".join(faults))


def check_kept_heads(shape: ModelShape, layout: Layout) -> None:
    """Refuse a decode-context-parallel width that gives the tokens of one KV head to ranks that hold another.

    Args:
        shape: Numbers of the model.
        layout: The layout.

    Raises:
        ConfigError: ``dcp`` is too wide; the text names the widths that work.
    """
    tp, cp = layout.tp, layout.cp
    if layout.dcp <= cp or tp > shape.num_query_heads:  # the latter has its own message
        return
    kv = [heads.kv for heads in split_heads(shape.num_query_heads, shape.num_kv_heads, parts=tp)]
    fits = [width for width in divisors(tp) if all(len(set(kv[first : first + width])) == 1 for first in range(0, tp, width))]
    if layout.dcp // cp not in fits:
        raise ConfigError(
            f"dcp={layout.dcp} spreads the tokens of a KV head over {layout.dcp // cp} neighbours of a tp group, which must hold "
            f"the same KV heads; with tp={tp} they hold {', '.join(_span(part) for part in kv)}; dcp that work: "
            f"{join_sizes(sorted({1, *(cp * width for width in fits)}))}"
        )


def _span(heads: range) -> str:
    return str(heads.start) if len(heads) == 1 else f"{heads.start}-{heads.stop - 1}"
