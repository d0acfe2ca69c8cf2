"""vLLM servers started by ajet."""
