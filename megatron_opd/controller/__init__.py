"""The controller: schedules rollouts, scoring, updates and publications. Torch-free."""
