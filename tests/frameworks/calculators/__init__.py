"""A calculator agent in each framework, as its quick start writes an agent with a tool; `solve` is
the workflow."""

import re


def calc(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: a+b, a-b or a*b.
    """
    parts = re.fullmatch(r"(\d{1,6})\s*([-+*])\s*(\d{1,6})", expression.strip())
    if parts is None:
        return "error"
    a, b = int(parts[1]), int(parts[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[parts[2]])
