"""Scores rollouts on the teachers' inference servers."""
