"""Selection, validation and statistics of rows."""
