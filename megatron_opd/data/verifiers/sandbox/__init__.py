"""Runs Python programs of unknown intent, shut off from the machine."""
