"""Runs workflows over tasks."""
