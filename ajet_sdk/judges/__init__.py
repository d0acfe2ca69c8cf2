"""Judges: they compute the reward of an output."""
