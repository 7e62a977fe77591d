"""Adapts the learner to the device it runs on."""
