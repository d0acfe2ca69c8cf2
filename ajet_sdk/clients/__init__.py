"""The HTTP libraries: how a request is seen, sent elsewhere, or watched, in each.

A rerouted request goes through a client of ours, for the agent's own may have a proxy, a mock or a base URL; its
timeout is kept. A watched one goes through the agent's client, and its response is read along with the agent, never
ahead of it.
"""

from ajet_sdk.clients.imports import LIBRARIES, Imports

__all__ = ["LIBRARIES", "Imports"]
