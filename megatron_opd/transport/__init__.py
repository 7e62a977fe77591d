"""Controller to learner messages."""
