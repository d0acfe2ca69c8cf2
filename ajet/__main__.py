"""`python -m ajet` is the `ajet` command."""

from ajet_tools.cli.app import main

if __name__ == "__main__":
    main()
