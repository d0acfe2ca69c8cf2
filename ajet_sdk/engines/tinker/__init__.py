"""Training services with the Tinker API: by the official SDK, and a sampler."""
