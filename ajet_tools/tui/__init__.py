"""The trace viewer: screens over the queries of `ajet_tools.trace`. No logic and no SQL lives here."""
