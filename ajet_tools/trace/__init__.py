"""Functions over traces for the command line and the viewers; independent of both."""
