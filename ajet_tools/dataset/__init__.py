"""Growing datasets from examples, documents and traces; filtering, deduplicating and splitting
them."""

import signal

import polars  # noqa: F401

if hasattr(
    signal, "siginterrupt"
):  # polars has reads, locks and joins begin again after Ctrl-C, so that it ends none
    signal.siginterrupt(signal.SIGINT, True)
