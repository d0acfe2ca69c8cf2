"""The model that generates rows."""
