"""The `ajet` command: `app.py` holds its shape, and each command has a module of its name."""
