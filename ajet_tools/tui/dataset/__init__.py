"""`ajet dataset view`: rows of a dataset in a table, to be read, searched, edited, accepted and rejected."""
