"""The dataset viewer."""
