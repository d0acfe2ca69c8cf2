"""Comparison of episodes and runs, and explanations of changes."""
