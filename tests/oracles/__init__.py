"""The recorded rank lists of other projects."""

import gzip
import json
from pathlib import Path
from typing import Any

__all__ = ["load_oracle"]


def load_oracle(name: str) -> Any:
    """Read one of the gzipped JSON files beside this module.

    Args:
        name: ``"rank_groups"`` or ``"more_peers"``.

    Returns:
        What the file holds.
    """
    return json.loads(gzip.decompress((Path(__file__).parent / f"{name}.json.gz").read_bytes()))
