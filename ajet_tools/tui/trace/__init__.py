"""The trace viewer, with a module per screen."""
