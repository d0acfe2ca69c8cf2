"""Training services with the Tinker API: the interface, its implementation by the official SDK, and a sampler."""
