"""The SDK: tracing, timelines and training of agents. Import the public names from `ajet`."""
