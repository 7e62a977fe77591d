"""The whole state of a learner, saved and loaded at any layout."""
