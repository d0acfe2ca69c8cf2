"""Training at a service that speaks the Tinker API: how it scales gradients, the trainer, the
learner."""
