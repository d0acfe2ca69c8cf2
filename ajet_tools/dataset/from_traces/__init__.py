"""Datasets from the episodes of a deployed agent."""
