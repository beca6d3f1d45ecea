"""Tests are repeatable and never judged by the clock; ranks as threads share two cores, so each computes with one thread."""

import torch
from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
torch.set_num_threads(1)
