"""`ajet trainer serve`: learner and sampler behind the HTTP routes of the Tinker API."""
