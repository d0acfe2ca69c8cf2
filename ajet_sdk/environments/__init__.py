"""Environments that agents act in: the client of a service, and a service that hosts them."""
