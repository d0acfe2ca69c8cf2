"""Generation of rows by a model."""
