"""Captures the LLM calls of an unmodified agent in its HTTP client."""
