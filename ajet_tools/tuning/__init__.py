"""Searching for better texts of an agent: its prompts."""
