"""Duplicates, near duplicates and contamination."""
