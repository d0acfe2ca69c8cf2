"""Settings for every test: one thread for torch, no network, hypothesis profiles."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

from hypothesis import HealthCheck, settings

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("default", max_examples=60, deadline=None, suppress_health_check=_quiet)
settings.register_profile("thorough", max_examples=10_000, deadline=None, suppress_health_check=_quiet)
settings.load_profile("default")
