"""Syncs the learner's weights to the student's servers."""
