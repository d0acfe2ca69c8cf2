"""Text for terminals, and the grammar of filters."""
