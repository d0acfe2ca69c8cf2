"""Code that several backbones share."""
