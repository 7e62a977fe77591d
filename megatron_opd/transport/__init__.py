"""Carries batches to the ranks of the learner, and what they computed back to the controller."""
