"""The trace store: one DuckDB file per process that writes, read live through its owner or at
rest."""
