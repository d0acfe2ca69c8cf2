"""Engines, which answer requests."""
