"""The server that most tests of this folder ask."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spmd.tiny_models import write_tiny_model
from tests.unit.serving.http.servers import Served, served


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a chat template that writes roles and contents one after the other."""
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab_size=300, max_positions=512)
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with served(model) as each:
        yield each
