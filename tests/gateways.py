"""One gateway for all tests of a process: starting one takes longer than most tests."""

from __future__ import annotations

import atexit
import functools

from ajet_sdk.gateway.gateway import Gateway


@functools.cache
def shared_gateway() -> Gateway:
    """Started at the first call, closed when the process ends."""
    gateway = Gateway().start()
    atexit.register(gateway.close)
    return gateway
