"""Holds the records that travel through a run: prompts, rollouts, samples, batches. Torch-free."""
