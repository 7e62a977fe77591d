"""Schedules rollouts, scoring, updates and weight syncs. Torch-free."""
