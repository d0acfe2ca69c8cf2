"""A training service that speaks the Tinker API: the seam, the official SDK behind it, what samples from it."""
