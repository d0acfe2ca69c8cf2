"""The tutorials that train, as a benchmark."""
