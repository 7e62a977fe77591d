"""Holds what a rank of the learner and a rank of a server must do alike with weights."""
