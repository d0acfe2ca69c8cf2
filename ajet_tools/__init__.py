"""The tools over traces and datasets: command line and terminal interface."""
