"""What the command line and the browser ask of a trace, without either."""
