"""Our learner and sampler behind the HTTP routes of the Tinker API: `ajet trainer serve`."""
