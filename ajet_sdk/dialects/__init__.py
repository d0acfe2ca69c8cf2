"""Wire formats of LLM requests and responses."""
