"""Runs trajectories of several turns: environments, tools, what a template adds. Torch-free."""
