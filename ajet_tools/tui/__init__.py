"""Viewers of traces and datasets, without logic and SQL."""
