"""Timelines of an episode as tokens: values, shading, facts, layout."""
