"""The local learner: loss, trainer, checkpoints, and recipes that make small models."""
