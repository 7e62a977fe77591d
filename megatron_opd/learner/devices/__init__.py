"""Where the learner runs."""
