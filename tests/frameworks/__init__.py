"""Agents as each framework's quick start writes them, against the real packages:
`just test-frameworks [NAME ...]`.

`table.py` has the versions, `agents/` the agents (a module a framework, no edit for ajet but the
decorator), `probe.py` runs a module's agents in its framework's environment, and `__main__.py`
makes the environments and prints the matrix.
"""
