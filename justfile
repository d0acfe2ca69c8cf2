set shell := ["bash", "-euo", "pipefail", "-c"]

# list the recipes
default:
    @just --list

# lint, types, layers
check:
    ruff check .
    ruff format --check .
    mypy
    lint-imports

# the whole test suite, in parallel
test *ARGS:
    pytest -n auto --dist worksteal {{ARGS}}

# the figures of the README; needs `pip install -e ".[bench]"` for the comparison with TRL
bench *ARGS:
    python -m tests.bench {{ARGS}}

# regenerate the command and config reference
docs:
    python -m ajet_tools.cli.reference docs/reference

# format in place
format:
    ruff check --fix .
    ruff format .
