"""Saves and loads the whole state of a learner, at any layout."""
