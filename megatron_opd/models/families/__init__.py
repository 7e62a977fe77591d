"""What each model family is: its parameters by name, and what its config.json leaves unsaid."""
