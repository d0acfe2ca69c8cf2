"""Manual review of a dataset."""
