"""Growing datasets from examples, documents and traces; filtering, deduplicating and splitting them."""
