"""Metrics, loggers, results and notices of a run."""
