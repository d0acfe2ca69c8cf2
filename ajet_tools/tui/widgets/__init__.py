"""Widgets of both viewers."""
