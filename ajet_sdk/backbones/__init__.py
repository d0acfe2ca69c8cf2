"""Backbones, which run a `Job` over an open gateway and trace writer."""
