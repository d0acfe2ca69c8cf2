"""Converts calls to timelines, and timelines to training samples."""
