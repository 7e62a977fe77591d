"""Publication of learner weights to the student fleet."""
