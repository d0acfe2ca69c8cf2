"""Backbones: each runs a `Job` over an open gateway and trace writer, and is a thin caller of `run_batch`."""
