"""Text of documents, split into blocks and chunks."""
