"""Holds a file for each model family: its parameters and the defaults of its config.json."""
