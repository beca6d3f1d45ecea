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

__all__ = ["check_model_fits"]


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
