"""Tests are repeatable and never judged by the clock; ranks as threads share two cores, so each computes with one thread."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.references import Reference, ask_transformers

settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_reference() -> Reference:
    """What ``transformers`` says about the embedded model."""
    return ask_transformers()
