"""Keeps the servers of a run under way: supervision, admission, elasticity, why it ended."""
