"""Runs untrusted programs, isolated and with limits."""
