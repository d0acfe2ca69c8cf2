"""Rows chosen, checked and counted."""
