"""Carries messages between controller and learner."""
