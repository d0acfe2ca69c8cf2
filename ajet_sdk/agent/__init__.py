"""The API for writing agents."""
